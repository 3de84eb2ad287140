"""Run `tune` command lines in order and print the exit code and output of each. This needs a separate process: pytest's
may be in a process group of one and has already read its environment."""

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
