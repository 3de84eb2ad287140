"""Runs command lines of `tune` one after the other, and prints of each the exit code and what it wrote: in a process of
its own, as that of pytest may be in a group of one, and has read its environment."""

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from tune import cli

done = []
for arguments in json.loads(sys.argv[1]):
    code: object = 0
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            cli.main(arguments)
        except SystemExit as end:
            code = end.code
    done.append((arguments, code, out.getvalue(), err.getvalue()))
print(json.dumps(done))
