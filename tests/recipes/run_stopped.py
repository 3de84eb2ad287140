"""Run full_finetune, and send SIGINT to the last process in the step of the first argument (0: never)."""

import os
import runpy
import signal
import sys

from tune import checkpointers, config

last, *settings = sys.argv[1:]
accepts = checkpointers.Checkpointer.accepts


def interrupted(self, step, *arguments, **values):
    if step == int(last) and self.world.rank == self.world.size - 1:
        os.kill(os.getpid(), signal.SIGINT)
    return accepts(self, step, *arguments, **values)


checkpointers.Checkpointer.accepts = interrupted
recipe = config.find_recipe("full_finetune")
sys.argv = [str(recipe), *settings]
try:
    runpy.run_path(str(recipe), run_name="__main__")
except SystemExit as end:
    sys.exit(0 if int(last) and end.code == 130 else end.code)
