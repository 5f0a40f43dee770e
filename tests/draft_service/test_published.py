"""The published drafts at their real sizes: what is made of them, from headers alone."""

from pathlib import Path

import pytest

from draft_service.check import resolve
from tests.published import BEGIN, DOCUMENT, END, OSS_20B, OSS_120B, PUBLISHED, table_lines, write_draft, write_targets

V3 = next(draft for draft in PUBLISHED if draft.name.endswith("-v3"))
LMSYS = next(draft for draft in PUBLISHED if draft.name.startswith("lmsys"))


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return write_targets(tmp_path_factory.mktemp("targets"))


def test_the_table_of_the_document_is_what_is_resolved(tmp_path):
    found = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    assert found.splitlines() == list(table_lines(tmp_path)), "python -m tests.published writes it anew"


def test_nothing_but_headers_and_the_map_is_read(tmp_path, targets):
    """60 GB of target and 1.5 GB of draft."""
    target, draft = targets[OSS_120B], write_draft(tmp_path, LMSYS)
    assert sum(path.stat().st_size for path in target.iterdir()) > 60e9
    before = bytes_read()
    assert resolve(draft, target)["draft vocabulary"] == "32000 of 201088, mapped by d2t"
    assert bytes_read() - before < 1 << 20


def bytes_read():
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


def test_a_draft_of_the_120b_beside_the_20b_is_refused_with_its_reason(tmp_path, targets):
    with pytest.raises(ValueError, match=r"aux boundaries \[24, 30, 36\] .*: expected 0\.\.24"):
        resolve(write_draft(tmp_path, V3), targets[OSS_20B])
