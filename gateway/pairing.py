"""What `--pair TARGET=DRAFT_A,DRAFT_B:10%` says: drafts beside a target, and their shares of its requests. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_WEIGHTED = re.compile(r"(?P<address>.*):(?P<weight>[^:]*)%")
_BARE_WEIGHT = re.compile(r"[^:\[\]/]+:\d+:[\d.]+")
_ADDRESS = re.compile(r"unix:\S+|\S*[^\s:/]:(?P<port>\d{1,5})")  # the latter also as dns:///HOST:PORT
_SAME = 1e-6  # percent


@dataclass(frozen=True)
class DraftShare:
    """A draft, and how many percent of its target's requests begin with it. 0: only those that ask for it by name."""

    address: str
    percent: float

    def __str__(self) -> str:
        return f"{self.address}:{self.percent:g}%"


@dataclass(frozen=True)
class Pair:
    """A target and the drafts beside it; their shares sum to 100 where there are any."""

    target: str
    drafts: tuple[DraftShare, ...] = ()

    def __str__(self) -> str:
        return "=".join(filter(None, (self.target, ",".join(map(str, self.drafts)))))


def parse_pairs(texts: Iterable[str]) -> list[Pair]:
    """The pairs of all `--pair`; one that names a target again adds drafts to it.

    Drafts without a weight share what the others leave. Raises ValueError that names what was found.
    """
    weights: dict[str, dict[str, float | None]] = {}
    for text in texts:
        target, equals, drafts = text.partition("=")
        _check_address(target, text)
        beside = weights.setdefault(target, {})
        if equals and not drafts:
            raise ValueError(f"--pair: expected at least one draft after the =, found {text!r}")
        for part in drafts.split(",") if drafts else ():
            address, weight = _parse_draft(part, text)
            if address in beside:
                raise ValueError(f"--pair: draft {address} stands twice beside target {target}, in {text!r}")
            beside[address] = weight
    if not weights:
        raise ValueError("--pair: expected TARGET[=DRAFT[:WEIGHT%],...] at least once, found none")
    return [Pair(target, _shares(target, beside)) for target, beside in weights.items()]


def _parse_draft(part: str, text: str) -> tuple[str, float | None]:
    """HOST:PORT or HOST:PORT:WEIGHT%."""
    weighted = _WEIGHTED.fullmatch(part)
    address = weighted["address"] if weighted else part
    _check_address(address, text)
    if weighted is None:
        return address, None
    try:
        weight = float(weighted["weight"])
    except ValueError:
        weight = -1.0
    if not 0 <= weight <= 100:
        raise ValueError(f"--pair: expected a weight of 0% to 100%, found {weighted['weight'] + '%'!r} in {text!r}")
    return address, weight


def _check_address(address: str, text: str) -> None:
    if _BARE_WEIGHT.fullmatch(address):
        raise ValueError(f"--pair: expected a weight to end with %, found {address!r} in {text!r}")
    matched = _ADDRESS.fullmatch(address)
    if matched is None or not 0 < int(matched["port"] or 1) < 2**16:
        raise ValueError(f"--pair: expected HOST:PORT[=HOST:PORT[:WEIGHT%],...], found {address!r} in {text!r}")


def _shares(target: str, weights: dict[str, float | None]) -> tuple[DraftShare, ...]:
    """The weights that were given, and the rest in equal parts."""
    given: Sequence[float] = [weight for weight in weights.values() if weight is not None]
    total, num_open = sum(given), len(weights) - len(given)
    found = ", ".join(f"{address}:{weight:g}%" for address, weight in weights.items() if weight is not None)
    if total > 100 + _SAME:
        raise ValueError(f"--pair: the weights beside target {target} sum to {total:g}%, more than 100%: {found}")
    if weights and not num_open and total < 100 - _SAME:
        raise ValueError(
            f"--pair: the weights beside target {target} sum to {total:g}%, expected 100% where every draft has one: "
            f"{found}"
        )
    rest = max(100 - total, 0.0) / max(num_open, 1)
    return tuple(DraftShare(address, rest if weight is None else weight) for address, weight in weights.items())
