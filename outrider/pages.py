"""Which pages of a paged key-value cache are free."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Hands out page numbers 0 to num_pages - 1; every number has at most one holder."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))  # the lowest on top

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the pages in use."""
        return 1 - len(self._free) / self.num_pages if self.num_pages else 0.0

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None where fewer are free; never a part of them."""
        if count > len(self._free):
            return None
        pages = self._free[len(self._free) - count :]
        pages.reverse()
        del self._free[len(self._free) - count :]
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Takes pages back from their holder."""
        self._free.extend(pages)
        if len(self._free) > self.num_pages:
            raise ValueError(f"pages were freed twice: {len(self._free)} free of {self.num_pages}")
