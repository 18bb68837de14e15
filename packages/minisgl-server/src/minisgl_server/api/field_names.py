"""Renames chat fields in error messages to those of the API whose request was translated into a chat."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from minisgl_core.errors import InvalidValueError
from minisgl_server.api.errors import ApiError, invalid_value

_MESSAGE = re.compile(r"messages\[(\d+)\](\.content)?.*")


class FieldNames:
    """Mapping from the fields of a chat to those of another API.

    `patterns` are regular expressions of a chat's fields, with their replacements. `messages` has the field that each of the
    chat's messages comes from, and `all_messages` that of all.
    """

    def __init__(self, patterns: Mapping[str, str], messages: Sequence[str], all_messages: str) -> None:
        self._patterns = {re.compile(pattern): name for pattern, name in patterns.items()}
        self._messages, self._all_messages = messages, all_messages

    def name(self, param: str) -> str:
        """Return the other API's name of a chat's field."""
        if param == "messages":
            return self._all_messages
        if (found := _MESSAGE.fullmatch(param)) and int(found[1]) < len(self._messages):
            return self._messages[int(found[1])] + (found[2] or "")
        for pattern, name in self._patterns.items():
            if pattern.match(param):
                return pattern.sub(name, param, count=1)
        return param

    @contextmanager
    def renaming_errors(self) -> Iterator[None]:
        """Rename the fields of errors that are raised inside."""
        try:
            yield
        except (ApiError, InvalidValueError) as error:
            raise self._renamed(invalid_value(error) if isinstance(error, InvalidValueError) else error) from None

    def _renamed(self, error: ApiError) -> ApiError:
        if error.param is None or (name := self.name(error.param)) == error.param:
            return error
        if error.message.startswith(error.param):
            error.message = name + error.message.removeprefix(error.param)
        error.message = error.message.replace(f"({error.param})", f"({name})")  # in a `ContextLengthError`
        error.param = name
        return error
