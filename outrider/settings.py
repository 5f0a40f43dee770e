"""Settings of a command: flags, then OUTRIDER_* environment, then a YAML file, then defaults.

The environment variable of `--kv-cache` of the target is OUTRIDER_TARGET_KV_CACHE. No option is called port or host:
Kubernetes injects <SERVICE>_PORT and <SERVICE>_SERVICE_HOST into every container.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import yaml
from typer.core import TyperCommand, TyperOption

from outrider.early_signals import take_early_signals


def _read_yaml(context: typer.Context, path: Path | None) -> Path | None:
    """Takes the file's keys as defaults of the options of the same name; refuses unknown keys."""
    if path is None:
        return None
    try:
        named = read_options(path, {parameter.name for parameter in context.command.params if parameter.name})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    repeatable = {parameter.name for parameter in context.command.params if getattr(parameter, "multiple", False)}
    for name in repeatable & set(named):
        named[name] = as_list(named[name])
    context.default_map = {**(context.default_map or {}), **named}
    return path


def as_list(value: Any) -> list[Any]:
    """What a file says of an option that may be repeated: a list, or one value that stands for itself."""
    return value if isinstance(value, list) else [value]


def read_options(path: Path, known: Collection[str]) -> dict[str, Any]:
    """The options in a YAML file by their names in Python. Raises ValueError that names the file and the fault."""
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # of bytes, of dates, of nesting, of the rest
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping of options to values, found {type(values).__name__}")
    named = {str(key).replace("-", "_"): value for key, value in values.items()}
    if unknown := set(named) - set(known):
        found, expected = (", ".join(map(_spelt, sorted(names))) for names in (unknown, known))
        raise ValueError(f"{path}: unknown option {found}; known are {expected}")
    return named


def _spelt(name: str) -> str:
    """An option as it is written on the command line, without its dashes in front."""
    return name.replace("_", "-")


def _known_level(level: str) -> str:
    if level.lower() not in _LEVELS:
        raise typer.BadParameter(f"expected {', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}, found {level!r}")
    return level


_LEVELS = ("debug", "info", "warning", "error")


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", is_eager=True, callback=_read_yaml, help="YAML file of options, below flags and environment."
    ),
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.", callback=_known_level)]
Listen = Annotated[str, typer.Option(help="HOST:PORT of gRPC; port 0 picks a free one.")]
MetricsListen = Annotated[str, typer.Option(help="HOST:PORT of /metrics; port 0 picks a free one.")]
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_options(**groups: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the fields of dataclasses as options; it takes each object as the argument of that name."""
    added = {group: _parameters(cls) for group, cls in groups.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> None:
            for group, cls in groups.items():
                arguments[group] = cls(**{option.name: arguments.pop(option.name) for option in added[group]})
            command(**arguments)

        own = inspect.signature(command, eval_str=True).parameters.values()
        options = [option.replace(kind=_KEYWORD) for option in own if option.name not in groups]
        options += [option for group in added.values() for option in group]
        wrapper.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {option.name: option.annotation for option in options}
        return wrapper

    return decorate


def _parameters(cls: Any) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters of a function."""
    hints = get_type_hints(cls, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            _KEYWORD,
            default=field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(cls)
    ]


class Command(TyperCommand):
    """A command whose help gives the rule for its variables once: beside each flag, narrow terminals cut them off."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help."""
        for option in self.get_params(ctx):
            if isinstance(option, TyperOption):
                option.show_envvar = option.envvar is not None
                option.metavar = "" if option.is_flag else option.metavar
        if prefix := ctx.auto_envvar_prefix:
            names = [option.name for option in self.params if option.name]
            name = next((name for name in names if "_" in name), names[0])
            variable = f"{prefix}_{name.upper()}"
            self.epilog = f"Each flag is an environment variable, too: --{_spelt(name)} is {variable}."
        super().format_help(ctx, formatter)


def run_command(
    command: Callable[..., Any], name: str, arguments: Sequence[str] | None = None, *, others_too: bool = False
) -> None:
    """Runs `command` as the command line of the service `name` and exits: 0, or 2 with what was wrong with a flag.

    others_too: flags that it does not know are the service's, and mean nothing to it.
    """
    take_early_signals()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    context: dict[str, Any] = {"auto_envvar_prefix": f"OUTRIDER_{name.upper()}", "show_default": True}
    context |= {"ignore_unknown_options": others_too, "allow_extra_args": others_too}
    app.command(cls=Command, context_settings=context)(command)
    app(args=None if arguments is None else list(arguments), prog_name=f"outrider {name}")


def split_flags(flag: str, text: str) -> list[str]:
    """Further flags for a service, given as one string. Raises a usage error that names the flag that holds them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise usage_error(f"{flag}: {error}, found {text!r}") from None


def parse_bytes(text: str, flag: str = "") -> int:
    """`512MiB`, `4GB`, `1000000` as bytes. Raises ValueError naming the flag, if given, and what it found."""
    units = {"": 1, "b": 1}
    for power, prefix in enumerate("kmgt", start=1):
        units |= {prefix: 1000**power, f"{prefix}b": 1000**power, f"{prefix}ib": 1024**power}
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(digits) :].strip().lower()
    try:
        return int(float(digits) * units[unit])
    except (KeyError, ValueError):
        named = f"{flag}: " if flag else ""
        raise ValueError(f"{named}expected a size such as 512MiB or 4GB, found {text!r}") from None


def parse_memory(text: str, total: int, flag: str = "") -> int:
    """As `parse_bytes`; or a fraction such as 0.3 of `total` bytes, which are all that there are, free or not.

    What happens to be free depends on who started first.
    """
    try:
        number = float(text)
    except ValueError:
        return parse_bytes(text, flag)
    if not 0 < number < math.inf:
        named = f"{flag}: " if flag else ""
        raise ValueError(f"{named}expected a size such as 512MiB, or a fraction above 0, found {text!r}")
    return int(number if number >= 1 else number * total)


def utf8(name: str, text: str) -> str:
    """What an argument or a line of standard input says, whatever the locale takes its bytes for.

    Raises a usage error naming it where they are no UTF-8.
    """
    try:
        return text.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise usage_error(f"{name}: expected UTF-8, found {text!r:.80}") from None


def usage_error(message: str) -> typer.BadParameter:
    """An error of the command line: printed with the usage, exit code 2."""
    return typer.BadParameter(message)
