"""SIGHUP: the pairs and their weights are read again from the file of `--config`. A bad file changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from prometheus_client import Gauge

from gateway.fleet import Fleet
from gateway.pairing import Pair, parse_pairs
from outrider.settings import as_list, read_options

log = logging.getLogger(__name__)


class PairsFile:
    """Where the pairs came from at start, and whether they can come from there again."""

    def __init__(self, path: Path | None, known: Collection[str], source: str) -> None:
        """`known` are the options that the file may have; `source` is what gave the pairs, in click's words."""
        self._path = path
        self._known = known
        self._source = source
        self._options = read_options(path, known) if path is not None else {}

    def read(self) -> list[Pair]:
        """The pairs as the file has them now. Raises ValueError that says why there are none."""
        if self._path is None:
            raise ValueError("there is no --config to read pairs from")
        if self._source != "DEFAULT_MAP":
            raise ValueError(f"the pairs come from --pair or the environment, which win over {self._path}")
        options = read_options(self._path, self._known)
        pairs = parse_pairs(_texts(options.pop("pair", [])))
        started = {name: value for name, value in self._options.items() if name != "pair"}
        for name in sorted({*options, *started}):
            if options.get(name) != started.get(name):
                log.warning("%s: %s has changed, which takes a restart; only pairs are taken up", self._path, name)
        return pairs


def on_hangup(file: PairsFile, fleet: Fleet, successful: Gauge) -> Callable[[], None]:
    """What SIGHUP does."""

    def reload() -> None:
        try:
            fleet.configure(file.read())
        except ValueError as error:
            successful.set(0)
            log.error("SIGHUP: %s; the pairs stay as they are", error)
        else:
            successful.set(1)
            log.info("SIGHUP: pairs are now %s", "; ".join(map(str, fleet.pairs)))

    return reload


def _texts(value: object) -> list[str]:
    """The option's value in YAML: one text or a list of them."""
    texts = as_list(value)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"pair: expected a list of TARGET[=DRAFT[:WEIGHT%],...], found {value!r}")
    return texts
