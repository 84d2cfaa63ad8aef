"""The notebook runs from its first cell to its last, and prints its kept outputs.

``jupyter execute --inplace examples/first_hour.ipynb`` keeps new ones.
"""

import base64
import os
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"
CELL_S = 60
MOST_BYTES = 100_000


def texts(notebook: Any) -> list[list[str]]:
    """Text of each output, without the decimals, which another processor rounds otherwise."""
    return [
        [
            re.sub(r"\d+\.\d+", "0.0", str(each.get("text") or each.data["text/plain"]))
            for each in cell.get("outputs", [])
        ]
        for cell in notebook.cells
    ]


@pytest.mark.slow
def test_the_notebook_prints_its_kept_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    kept, notebook = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    nbclient.NotebookClient(notebook, timeout=CELL_S, kernel_name="python3").execute()
    assert texts(notebook) == texts(kept)
    said = "".join(
        each.get("text", "") for cell in notebook.cells for each in cell.get("outputs", [])
    )
    assert float(re.findall(r"^reward (\S+)$", said, re.M)[0]) > 0.7


def test_the_notebook_keeps_a_curve_and_stays_small() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (picture,) = [
        each.data["image/png"]
        for cell in notebook.cells
        for each in cell.get("outputs", [])
        if "image/png" in each.get("data", {})
    ]
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    assert "Traceback" not in NOTEBOOK.read_text()
