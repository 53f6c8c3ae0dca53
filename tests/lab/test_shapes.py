"""Files of shapes whose numbers or cells no reader takes are refused as other bad rows are."""

from __future__ import annotations

import pytest

from isogemm.errors import OptionError, ShapeError
from isogemm.lab.shapes import read_shapes

DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"[[{DIGITS}, 4]]", OptionError),
        (f'[["{DIGITS}", 4]]', ShapeError),
        (f"[[{DIGITS[:4000]}, 4]]", ShapeError),
        (f"8,{DIGITS}\n", ShapeError),
        (f"8,4,{'x' * 140_000}\n", OptionError),
    ],
)
def test_what_is_too_long_is_refused_in_a_line(tmp_path, text, error):
    path = tmp_path / "shapes"
    path.write_text(text)
    with pytest.raises(error, match=str(path)) as found:
        read_shapes(str(path))
    assert len(str(found.value)) < 500
