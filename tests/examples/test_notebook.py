"""The notebook runs from its first cell to its last, and is kept without outputs."""

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"
CELL_S = 60


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=CELL_S, kernel_name="python3").execute()
    said = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "8 sequences, 32 tokens" in said
    assert "logprobs" in said and "expected" in said, "the refused sample"
    assert "8 trajectories trained" in said


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert cells
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
