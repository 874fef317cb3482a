"""index.errors: one family, documented by its classes."""

from __future__ import annotations

import pytest

from index import errors


def every_error() -> list[type[errors.RegraftError]]:
    return [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.RegraftError)]


@pytest.mark.parametrize("error", every_error())
def test_an_error_without_message_says_its_docstring(error: type[errors.RegraftError]) -> None:
    raised = error()
    assert raised.message == error.__doc__
    assert str(raised) == raised.message
    assert raised.pointer == ""


def test_an_error_keeps_its_message_and_pointer() -> None:
    raised = errors.InvalidVector("too short", pointer="/items/3/embedding")
    assert (raised.message, raised.pointer, raised.status) == ("too short", "/items/3/embedding", 422)


def test_every_error_but_a_damaged_folder_or_a_missing_device_is_the_clients_and_each_has_its_own_code() -> None:
    codes = [e.code for e in every_error()]
    assert len(codes) == len(set(codes)) >= 7
    assert [e.code for e in every_error() if not 400 <= e.status < 500] == ["changed_on_disk", "device_unavailable"]
