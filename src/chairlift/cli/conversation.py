"""A conversation in the terminal: its messages, its settings and the commands that change them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from chairlift.cli.chat_backends import ChatBackend
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.machine.files import create_private
from chairlift.options import options_of, read_text
from chairlift.terminal.answers import AnswerText
from chairlift.terminal.console import note
from chairlift.terminal.options import ChatOptions, SamplingOptions
from chairlift.text.assistant_parts import ContentDelta
from chairlift.text.messages import checked_messages

HELP = """\
/set NAME VALUE  set a sampling parameter, reasoning or plain; /set lists them
/system TEXT     set the system message; without TEXT, remove it
/retry           answer the last message again, with another seed
/undo            forget the last message and its answer
/save FILE       write the conversation and its settings
/load FILE       continue a saved conversation
/clear           start a new conversation
/quit            leave (so does Ctrl-D); Ctrl-C stops an answer

Alt-Enter, or a \\ at the end of a line, continues a message on a new line.
\"\"\" begins and ends a message of many lines; a pasted text is one message.
A message that begins with a space is not kept in the history."""

_ALIASES = {"/?": "/help", "/reset": "/clear", "/new": "/clear", "/bye": "/quit", "/exit": "/quit", "/regen": "/retry"}
_COMMAND = re.compile(r"/[a-z?]+(?=\s|$)")
_ROLES = ("system", "developer", "user", "assistant")

_SAMPLING = {option.name: option for option in options_of(SamplingOptions)}
_SHOWN = {option.name: option for option in options_of(ChatOptions) if option.name in ("reasoning", "plain")}
_OPTIONS = _SAMPLING | _SHOWN
# Names of llama.cpp and ollama.
_OTHER_NAMES = {"num_predict": "max_tokens", "n_predict": "max_tokens", "temp": "temperature"}
_OTHER_NAMES |= {"repeat_penalty": "repetition_penalty", "think": "reasoning"}
_SWITCHES = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


class QuitChat(Exception):
    """The user has asked to leave."""


class Conversation:
    def __init__(
        self,
        backend: ChatBackend,
        options: ChatOptions,
        changed: Mapping[str, Any],
        *,
        quiet: bool = False,
        show_figures: bool = True,
    ) -> None:
        """`changed` are the sampling parameters that the user has set."""
        self._backend = backend
        self._options = options
        self._changed = dict(changed)
        self._quiet = quiet
        self._show_figures = show_figures and not quiet
        self._system = options.system
        self._turns: list[tuple[str, str | None]] = []  # questions and answers
        self._retries = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: note(HELP, style=""),
            "/set": self._set,
            "/system": self._set_system,
            "/retry": lambda _: self._retry(),
            "/undo": lambda _: self._undo(),
            "/save": lambda name: self._save(_path(name)),
            "/load": lambda name: self._load(_path(name)),
            "/clear": lambda _: self._clear(),
            "/quit": _quit,
        }

    def handle(self, text: str) -> None:
        """Run a command or answer a message; raises QuitChat, or ChairliftError for what is wrong with it."""
        command = _COMMAND.match(text) if "\n" not in text else None
        if command is None:
            self.send(text)
            return
        name = _ALIASES.get(command[0], command[0])
        if name in self._commands:
            self._commands[name](text[command.end() :].strip())
            return
        close = get_close_matches(name, self._commands, n=1)
        note(f"There is no {name}; " + (f"did you mean {close[0]}?" if close else "/help lists the commands."))

    def complete(self, text: str) -> Sequence[str]:
        """Return what the beginning of a line may become."""
        if text.startswith("/set "):
            return [f"/set {name} " for name in _OPTIONS if name.startswith(text.removeprefix("/set "))]
        return [f"{name} " for name in self._commands if text and name.startswith(text)]

    def send(self, question: str, *, changed: Mapping[str, Any] | None = None) -> bool:
        """Print the answer as it arrives and keep both, also if it is stopped; return whether it was not."""
        view = AnswerText(plain=self._options.plain, show_reasoning=self._options.reasoning == "show")
        messages = [*self._messages(), {"role": "user", "content": question}]
        reasons = self._options.reasoning != "off"
        answer = self._backend.answer(messages, self._changed if changed is None else changed, reasons=reasons)
        pieces: list[str] = []
        stopped = False
        try:
            for part in answer:
                if isinstance(part, ContentDelta):
                    pieces.append(part.text)
                view.push(part)
            view.close()
        except KeyboardInterrupt:
            stopped = True
            view.close(stopped=True)
        except ChairliftError:
            if view.has_text:
                view.close()
            raise
        finally:
            answer.close()
            if pieces:  # Without any, the question is dropped too.
                self._turns.append((question, "".join(pieces)))
        if self._show_figures:
            note(self._backend.summary())
        elif self._backend.cut_off and not self._quiet:
            note(self._backend.cut_off)
        return not stopped

    def _messages(self) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        for question, answer in self._turns:
            messages.append({"role": "user", "content": question})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return messages

    # ---- commands ------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._turns.clear()
        note("New conversation.")

    def _set_system(self, text: str) -> None:
        self._system = text
        note(f"System message: {text}" if text else "No system message.")

    def _undo(self) -> None:
        if not self._turns:
            raise InvalidParameter("", "there is nothing to undo")
        question, _ = self._turns.pop()
        note(f"Forgotten: {_shorten(question)}")

    def _retry(self) -> None:
        if not self._turns:
            raise InvalidParameter("", "there is no message to answer again")
        changed = dict(self._changed)
        self._retries += 1
        sampling = self._sampling(changed)
        if sampling.seed is not None:
            changed["seed"] = sampling.seed + self._retries
        if sampling.temperature == 0:
            note("The temperature is 0, so the answer is the same; /set temperature 0.7 changes that.")
        last = self._turns.pop()
        kept = len(self._turns)
        try:
            self.send(last[0], changed=changed)
        finally:
            if len(self._turns) == kept:  # It gave no text.
                self._turns.append(last)

    def _set(self, text: str) -> None:
        name, _, value = text.removeprefix("parameter ").strip().partition(" ")
        if not name:
            note("\n".join(f"{each:<20} {self._value(each)}" for each in _OPTIONS), style="")
        elif name == "system":
            self._set_system(value.strip())
        elif not value:
            name = _option_name(name)
            note(f"{name}: {self._value(name)}")
        else:
            name = _option_name(name)
            self._apply({name: None if value.strip() == "default" else _parse(name, value.strip())})
            note(f"{name}: {self._value(name)}")

    def _value(self, name: str) -> str:
        if name in _SHOWN:
            return _written(getattr(self._options, name))
        if name in self._changed:
            return _written(self._changed[name])
        if not self._backend.knows_defaults:
            return "the server's"
        default = getattr(self._backend.defaults(self._changed.get("preset")), name)
        if default is None and name == "max_tokens":
            default = self._backend.answer_limit(reasons=self._options.reasoning != "off") or "what fits"
        return f"{_SAMPLING[name].default_text or 'none' if default is None else _written(default)} (default)"

    def _sampling(self, changed: Mapping[str, Any]) -> SamplingOptions:
        """The sampling parameters with these changes."""
        return replace(self._backend.defaults(changed.get("preset")), **changed)

    def _apply(self, values: Mapping[str, Any]) -> None:
        """Set parameters if all are right; None is the default."""
        changed, options = {**self._changed}, self._options
        for name, value in values.items():
            if value is not None:
                _OPTIONS[name].check_value(value)
            if name in _SHOWN:
                options = replace(options, **{name: _SHOWN[name].default if value is None else value})
            elif value is None:
                changed.pop(name, None)
            else:
                changed[name] = value
        self._sampling(changed).params()
        self._changed, self._options = changed, options

    # ---- files ---------------------------------------------------------------------------------------------------

    def _save(self, path: Path) -> None:
        if not self._turns:
            raise InvalidParameter("", "there is nothing to save yet")
        if path.exists():
            _read_conversation(path)  # raises for other files, which are not replaced
        shown = {name: getattr(self._options, name) for name in _SHOWN}
        saved = {"model": self._backend.model, "messages": self._messages(), "settings": self._changed | shown}
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            # A server may send halves of characters.
            with os.fdopen(create_private(temporary), "w", encoding="utf-8", errors="replace") as file:
                json.dump(saved, file, ensure_ascii=False, indent=2)
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise InvalidParameter("", f"cannot write {str(path)!r} ({error.strerror or error})") from None
        note(f"Saved {_count(self._turns)} to {path}.")

    def _load(self, path: Path) -> None:
        model, system, turns, settings = _read_conversation(path)
        self._apply(settings)
        self._system, self._turns = system, turns
        other = f" It was held with {model}." if model and model != self._backend.model else ""
        last = f" The last message: {_shorten(turns[-1][0])}" if turns else ""
        note(f"Loaded {_count(turns)}.{other}{last}")


def _quit(_: str) -> None:
    raise QuitChat


def _count(turns: Sequence[Any]) -> str:
    return "1 question" if len(turns) == 1 else f"{len(turns)} questions"


def _shorten(text: str, limit: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _path(name: str) -> Path:
    if not name:
        raise InvalidParameter("", "name a file")
    try:
        path = Path(name.strip("\"'")).expanduser()
        with suppress(FileNotFoundError):
            path.stat()
        return path
    except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have, or `~` of an unknown user
        raise InvalidParameter("", f"{name!r:.100}: {error}") from None


def _written(value: Any) -> str:
    """Return a value as it is typed."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(json.dumps, value)) if isinstance(value, (list, tuple)) else str(value)


def _option_name(name: str) -> str:
    known = name.removeprefix("--").replace("-", "_").lower()
    known = _OTHER_NAMES.get(known, known)
    if known not in _OPTIONS:
        close = get_close_matches(known, _OPTIONS, n=1)
        suggestion = f"did you mean {close[0]}?" if close else f"choose from {', '.join(_OPTIONS)}"
        raise InvalidParameter(name[:40], f"is not a parameter; {suggestion}")
    return known


def _parse(name: str, text: str) -> Any:
    """Return the value that a text stands for."""
    kind = _OPTIONS[name].kind
    if kind is list:
        return [text.strip('"').replace("\\n", "\n")]
    if kind is bool:
        if text.lower() not in _SWITCHES:
            raise InvalidParameter(name, f"must be on or off, got {text!r:.40}")
        return _SWITCHES[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise InvalidParameter(
            name, f"must be {'a number' if kind is float else 'an integer'}, got {text!r:.40}"
        ) from None


def _read_conversation(path: Path) -> tuple[str, str, list[tuple[str, str | None]], dict[str, Any]]:
    """Return the model, the system message, the turns and the settings in a file."""
    if not path.is_file() and path.exists():
        raise InvalidParameter("", f"{str(path)!r} is not a file")
    text = read_text(path, "")
    try:
        parsed = json.loads(text)
        fields = {"messages": parsed} if isinstance(parsed, list) else parsed
        if not isinstance(fields, dict) or set(fields) - {"model", "messages", "settings"} or "messages" not in fields:
            raise InvalidParameter("", 'it must look like {"messages": […], "settings": {…}}')
        json.dumps(fields, ensure_ascii=False).encode()  # raises for halves of characters
        settings = fields.get("settings", {})
        if not isinstance(settings, dict):
            raise InvalidParameter("settings", "must map names to values")
        named = {_option_name(str(name)): value for name, value in settings.items()}
        return str(fields.get("model") or "")[:100], *_turns(checked_messages(fields["messages"])), named
    except InvalidParameter as error:
        problem = str(error)
    except RecursionError:
        problem = "it is nested too deeply"
    except ValueError as error:
        problem = f"it is not JSON ({error})"
    raise InvalidParameter("", f"{str(path)!r} is no conversation: {problem}")


def _turns(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[str, str | None]]]:
    """Return the system message, and the questions with their answers."""
    system: list[str] = []
    turns: list[tuple[str, str | None]] = []
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role not in _ROLES or not isinstance(content, str):
            raise InvalidParameter(f"messages[{number}]", f"must be a text of {', '.join(_ROLES)}, got {role!r:.40}")
        if role == "user":
            turns.append((content, None))
        elif role == "assistant" and turns and turns[-1][1] is None:
            turns[-1] = (turns[-1][0], content)
        elif role == "assistant":
            raise InvalidParameter(f"messages[{number}]", "is an answer without a message before it")
        elif turns:
            raise InvalidParameter(f"messages[{number}]", "is a system message after the first message")
        else:
            system.append(content)
    return "\n".join(system), turns
