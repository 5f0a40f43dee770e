"""Conversations rendered with the model's own template, in a sandbox: the template is data from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import FailedPrecondition, InvalidArgument


class ChatTemplate:
    """A Jinja template with the environment that published templates are written for."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise FailedPrecondition(f"chat template: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def of_files(cls, files: Mapping[str, bytes], config: Mapping[str, Any]) -> ChatTemplate | None:
        """The template of a checkpoint: chat_template.jinja, else tokenizer_config.json's; None without one."""
        source: Any = config.get("chat_template")
        if isinstance(source, list):
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        if "chat_template.jinja" in files:
            source = files["chat_template.jinja"].decode()
        if not source:
            return None
        tokens = {key: _content(value) for key, value in config.items() if key.endswith("_token") and value}
        return cls(str(source), {key: value for key, value in tokens.items() if value})

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as text, the assistant's turn opened. Raises InvalidArgument where the template refuses."""
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidArgument("conversation", f"the model's chat template refuses it: {error}") from error


def _content(token: Any) -> str:
    """A special token is written as a string or as an object with its content."""
    return token if isinstance(token, str) else str(token.get("content", "")) if isinstance(token, dict) else ""


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Jinja's own would escape for HTML and write non-ASCII as escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
