"""Pairs and weights: what a flag says, and what is wrong with it."""

from __future__ import annotations

import pytest

from gateway.pairing import DraftShare, Pair, parse_pairs


def shares(*texts: str) -> dict[str, float]:
    """Percent by draft, of one target."""
    (pair,) = parse_pairs(texts)
    return {draft.address: draft.percent for draft in pair.drafts}


def test_pairs_and_weights() -> None:
    assert parse_pairs(["a:1=b:2", "unix:/x"]) == [Pair("a:1", (DraftShare("b:2", 100),)), Pair("unix:/x")]
    assert shares("a:1=b:2,c:3:10%") == {"b:2": 90, "c:3": 10}
    assert shares("a:1=b:2,c:3,d:4:2.5%,unix:/e:7.5%") == {"b:2": 45, "c:3": 45, "d:4": 2.5, "unix:/e": 7.5}
    assert shares("a:1=dns:///b:65535") == {"dns:///b:65535": 100}
    assert shares("a:1=b:2", "a:1=c:3") == {"b:2": 50, "c:3": 50}
    assert shares("a:1=b:2,c:3:0%") == {"b:2": 100, "c:3": 0}
    assert shares("a:1=b:2,c:3:100%") == {"b:2": 0, "c:3": 100}
    assert shares("a:1=[::1]:2,[::2]:3:30%") == {"[::1]:2": 70, "[::2]:3": 30}
    assert shares("a:1=b:2:33.3%,c:3:33.3%,d:4:33.4%")["d:4"] == 33.4
    assert [str(pair) for pair in parse_pairs(["a:1=b:2,c:3:10%"])] == ["a:1=b:2:90%,c:3:10%"]


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ([], "found none"),
        ([""], "found ''"),
        (["a:1="], "at least one draft after the =, found 'a:1='"),
        (["=b:2"], "found '' in '=b:2'"),
        (["a=b:1"], "found 'a' in 'a=b:1'"),
        (["a:1=b:1,"], "found '' in 'a:1=b:1,'"),
        (["a:1=b:2,b:2"], "draft b:2 stands twice beside target a:1"),
        (["a:1=b:2", "a:1=b:2:10%"], "draft b:2 stands twice beside target a:1"),
        (["a:1=b:2:60%,c:3:41%"], "sum to 101%, more than 100%: b:2:60%, c:3:41%"),
        (["a:1=b:2:60%", "a:1=c:3:41%"], "sum to 101%, more than 100%: b:2:60%, c:3:41%"),
        (["a:1=b:2:60%,c:3:30%"], "sum to 90%, expected 100% where every draft has one: b:2:60%, c:3:30%"),
        (["a:1=b:2:101%"], "a weight of 0% to 100%, found '101%'"),
        (["a:1=b:2:-1%"], "a weight of 0% to 100%, found '-1%'"),
        (["a:1=b:2:ten%"], "a weight of 0% to 100%, found 'ten%'"),
        (["a:1=b:2:nan%"], "a weight of 0% to 100%, found 'nan%'"),
        (["a:1=b:2:10"], "expected a weight to end with %, found 'b:2:10'"),
        (["a:1=b:2, c:3:10%"], "expected HOST:PORT[=HOST:PORT[:WEIGHT%],...], found ' c:3' in"),
        (["a:1 =b:2"], "found 'a:1 ' in"),
        (["a:1=:2"], "found ':2' in"),
        (["a:1=b:http"], "found 'b:http' in"),
        (["a:0"], "found 'a:0' in"),
        (["a:1=dns:///b:65536"], "found 'dns:///b:65536' in"),
        (["dns:///b"], "found 'dns:///b' in"),
    ],
)
def test_mistakes_are_named(texts: list[str], found: str) -> None:
    with pytest.raises(ValueError, match=r"^--pair: ") as raised:
        parse_pairs(texts)
    assert found in str(raised.value)
