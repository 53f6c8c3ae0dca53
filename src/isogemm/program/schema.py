"""The JSON Schemas of plans and layouts, which are shipped, and validation by them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ..base.extras import require_extra
from ..errors import OptionError


@cache
def schema(name: str) -> dict[str, Any]:
    """The schema of a ``plan`` or a ``layout``."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "schemas" / f"{name}.json").read_text())
    return found


def validate(name: str, data: Any) -> None:
    """Raise what is wrong with a plan or a layout by its schema: an OptionError with the field and the rule.

    It is an OptionError, too, where the extra ``isogemm[program]`` is not installed.
    """
    require_extra("program", "reading plans", "jsonschema")
    import jsonschema

    wrong = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema(name)).iter_errors(data))
    if wrong is not None:
        where = wrong.json_path.removeprefix("$").lstrip(".") or name
        rule = f"{wrong.validator}: {wrong.validator_value}"
        raise OptionError(where, limit=rule, value=repr(wrong.instance)[:80], nearest=f"see schemas/{name}.json")
