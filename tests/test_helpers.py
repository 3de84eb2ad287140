"""Processes that tests start run a script as `python script` does."""

from pathlib import Path

import pytest
from helpers import run_processes


@pytest.mark.slow
def test_failing_process_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    failing = "import os, time\nif os.environ['RANK'] == '1':\n    raise OSError('no luck')\ntime.sleep(9999)\n"
    script.write_text(failing)
    with pytest.raises(AssertionError, match="OSError: no luck"):
        run_processes(script, 2)
    script.write_text("import os, sys\nprint(sys.argv[1:], __name__, sys.path[0], os.environ['RANK'])\n")
    assert run_processes(script, 2, "a b") == f"['a b'] __main__ {tmp_path} 0\n"
