import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from outrider.pages import PageAllocator


class Pages(RuleBasedStateMachine):
    """Any sequence of allocations and frees: no page has two holders, and none is lost."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.pages = PageAllocator(12, page_size=4)
        self.in_use = []

    @rule(target=held, count=st.integers(0, 14))
    def allocate(self, count):
        free = self.pages.num_free
        found = self.pages.allocate(count)
        if found is None:
            assert count > free
            return []
        assert len(found) == count
        self.in_use += found
        return found

    @rule(found=consumes(held))
    def free(self, found):
        self.pages.free(found)
        for page in found:
            self.in_use.remove(page)

    @invariant()
    def every_page_has_one_holder(self):
        assert len(set(self.in_use)) == len(self.in_use)
        assert self.pages.num_free == 12 - len(self.in_use)
        assert self.pages.usage == pytest.approx(len(self.in_use) / 12)


TestPages = Pages.TestCase


def test_pages_for_a_number_of_tokens():
    pages = PageAllocator(12, page_size=4)
    assert [pages.pages_for(count) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_freeing_twice_is_an_error():
    pages = PageAllocator(2, page_size=4)
    found = pages.allocate(1)
    pages.free(found)
    with pytest.raises(ValueError, match="freed twice"):
        pages.free(found)
