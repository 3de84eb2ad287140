"""Right and wrong edits of a copied full_finetune, as people make them.

`RIGHT`: name -> replacements of the text, or a function of it. `WRONG`: the same, with the texts of the lines that are
wrong. Each right one trains and each wrong one fails in a run.
"""

import textwrap

from tune.config import find_recipe

Edit = tuple[str, str]

# Lines of the recipe, to which edits are made.
IMPORT = "import torch\n"
ENTRYPOINT = '@config.entrypoint("full_finetune")  # the name of its YAML; `tune cp` renames it, here and in Run\n'
LOSS = "    loss_fn = instantiate(cfg.loss)\n"
WITH_RUN = "    with run:  # closes its files and the process group, however the training ends\n"
STEPS = "run.steps(data, checkpointer, evaluator, seed=cfg.seed)"
LOOP = f"        for step, batch in {STEPS}:\n"
BACKWARD = "                loss.backward()\n"
CLIP = "            grad_norm = distributed.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)\n"
ACCEPTS = "            if checkpointer.accepts("
SCHEDULE_STEP = "            schedule.step()\n"
ZERO_GRAD = "            optimizer.zero_grad()\n"
LOG = "            run.log(step, batch, metrics)\n"
FINISH = (
    "        run.finish()  # last measurements; with keep_best, the best weights; after Ctrl-C the process exits here\n"
)
DONE = '        checkpointers.export(model, tokenizer, run.path / "model", source=cfg.model.path, card=card)\n'
END = 'if __name__ == "__main__":\n    main()\n'


def after(line: str, text: str) -> Edit:
    return line, line + at(line, text)


def before(line: str, text: str) -> Edit:
    blank = "" if line.startswith(" ") or line == IMPORT else "\n\n"
    return line, at(line, text) + blank + line


def instead(line: str, text: str) -> Edit:
    return line, at(line, text)


def at(line: str, text: str) -> str:
    """Return a text with the indentation of a line."""
    indentation = " " * (len(line) - len(line.lstrip(" ")))
    return textwrap.indent(textwrap.dedent(text).strip("\n"), indentation) + "\n"


def applied(edit) -> str:
    """Return full_finetune's text with an edit."""
    text = find_recipe("full_finetune").read_text()
    if callable(edit):
        return edit(text)
    for old, new in edit:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def loop_in_a_helper(text: str) -> str:
    """Move the loop into a function `train`."""
    head, rest = text.split("    with run:  # closes")
    body, tail = rest.split(FINISH)
    lines = ("    with run:  # closes" + body).splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if STEPS in line)
    moved = textwrap.indent(textwrap.dedent("".join(lines[start:])), "    ")
    names = "cfg, world, run, model, data, checkpointer, evaluator, loss_fn, optimizer, schedule"
    function = f"def train({names}):\n{moved}\n\n"
    text = head + "".join(lines[:start]) + f"        train({names})\n\n{FINISH}" + tail
    return text.replace(ENTRYPOINT, function + ENTRYPOINT)


def around_main(handler: str):
    """Return a function that puts the body of main into a `try` with a handler."""

    def edit(text: str) -> str:
        head, rest = text.split("def main(cfg):\n")
        body, tail = rest.split("\n\nif __name__")
        handled = textwrap.indent(textwrap.dedent(handler).strip("\n"), "    ")
        tried = textwrap.indent(body, "    ")
        return f"{head}def main(cfg):\n    try:\n{tried}{handled}\n\n\nif __name__{tail}"

    return edit


PRINTED = """
    except Exception as error:
        print('failed', error)
        raise
"""
BARE = """
    except:
        raise
"""
FINALLY = """
    finally:
        print('end')
"""
ALL_OF_THEM = """
    except BaseException:
        print('end')
        raise
"""


def edited(edit, *lines: Edit):
    """Return a function that makes an edit, then replaces texts."""

    def both(text: str) -> str:
        text = edit(text)
        for old, new in lines:
            text = text.replace(old, new)
        return text

    return both


WRONG_BACKWARD = ("loss.backward()", "loss.backwards()")
WRONG_SCHEDULE = ("schedule.step()", "scheduel.step()")

RIGHT = {
    "try/continue around backward": [
        instead(
            BACKWARD,
            """
                try:
                    loss.backward()
                except torch.OutOfMemoryError:
                    continue
            """,
        ),
    ],
    "try: break": [
        after(
            SCHEDULE_STEP,
            """
                try:
                    if step > 100:
                        break
                except ValueError:
                    pass
            """,
        ),
    ],
    "try: return finally": [
        after(
            LOSS,
            """
                try:
                    if cfg.seed == 17:
                        return
                finally:
                    pass
            """,
        ),
    ],
    "while True: return/break": [
        after(
            LOSS,
            """
                while True:
                    if cfg.seed == 17:
                        return
                    break
            """,
        ),
    ],
    "with f(): continue": [
        before(
            BACKWARD,
            """
                with torch.no_grad():
                    if step == 1000:
                        continue
            """,
        ),
    ],
    "match: continue": [
        before(
            BACKWARD,
            """
                match step:
                    case 1000:
                        continue
                    case int(n) if n > 10**6:
                        break
                    case _:
                        pass
            """,
        ),
    ],
    "for/else: continue": [
        after(
            SCHEDULE_STEP,
            """
                for each in range(3):
                    if each == 7:
                        break
                else:
                    optimizer.zero_grad()
                    run.log(step, batch, metrics)
                    continue
            """,
        ),
    ],
    "nonlocal": [
        after(
            LOSS,
            """
                count = 0

                def add():
                    def inner():
                        nonlocal count
                        count += 1
                    inner()

                add()
                assert count == 1
            """,
        ),
    ],
    "annotation of a local name": [
        after(LOSS, "history: list[Foo] = []"),
        after(
            IMPORT,
            """
                from typing import TYPE_CHECKING

                if TYPE_CHECKING:
                    from nowhere import Foo
            """,
        ),
    ],
    "future annotations": [
        before(IMPORT, "from __future__ import annotations"),
        after(
            LOSS,
            """
                def noted(x: Unknown) -> Unknown:
                    return x

                noted(1)
            """,
        ),
    ],
    "main(cfg, log=print)": [
        ("def main(cfg):", "def main(cfg, log=print):"),
        after(LOSS, "log('ready')"),
    ],
    "if not isfinite: raise": [
        before(
            BACKWARD,
            """
                if not torch.isfinite(loss):
                    raise RuntimeError('the loss is not finite')
            """,
        ),
    ],
    "assert isfinite(grad_norm)": [
        after(CLIP, "assert torch.isfinite(grad_norm)"),
    ],
    "assert on a made-up metric": [
        before(ACCEPTS, "assert metrics['loss'] < 0.9 or metrics['loss'] > 1.1"),
    ],
    "while not isfinite": [
        before(
            BACKWARD,
            """
                while not torch.isfinite(loss):
                    loss = model(micro_batch, loss_fn) / 2
            """,
        ),
    ],
    "empty().fill_()": [
        after(
            LOSS,
            """
                table = torch.empty(4).fill_(2.0)
                assert table.sum() == 8
            """,
        ),
    ],
    "large zeros": [
        after(
            LOSS,
            """
                mask = torch.zeros(2_000_000)
                assert mask.sum() == 0
            """,
        ),
    ],
    "safetensors save_file": [
        before(LOG, "save_file({'a': next(model.parameters()).detach().clone()}, run.path / 'x.safetensors')"),
        after(IMPORT, "from safetensors.torch import save_file"),
    ],
    "main() without a guard": [
        instead(END, "main()"),
    ],
    "generator and comprehension scopes": [
        after(
            LOSS,
            """
                def chunks(n):
                    for i in range(n):
                        if i == 1:
                            continue
                        yield i

                step = 'mine'
                assert [step for step in chunks(3)] == [0, 2] and step == 'mine'
                pairs = {cfg: k for cfg, k in zip('ab', chunks(9))}
                assert cfg.seed == 0 and len(pairs) == 2
            """,
        ),
    ],
    "walrus in while": [
        after(
            LOSS,
            """
                n = 5
                seen = []
                while (n := n - 1) > 0:
                    if n == 2:
                        continue
                    seen.append(n)
                assert seen == [4, 3, 1] and any((last := each) == 3 for each in seen) and last == 3
            """,
        ),
    ],
    "lambda defaults": [
        after(
            LOSS,
            """
                scales = [lambda x, k=k: x * k for k in range(3)]
                assert [f(2) for f in scales] == [0, 2, 4]
                late = [lambda: k for k in range(3)]
                assert [f() for f in late] == [2, 2, 2]
            """,
        ),
    ],
    "star-args": [
        after(
            LOSS,
            """
                first, *rest = [1, 2, 3]
                def total(a, /, *more, scale=1, **named):
                    return (a + sum(more) + sum(named.values())) * scale
                assert total(first, *rest, scale=2, **{'x': 4}) == 20
            """,
        ),
    ],
    "try/finally around the loop": [
        before(LOOP, "closed = []"),
        after(
            SCHEDULE_STEP,
            """
                try:
                    if step == 10**6:
                        return
                finally:
                    closed.append(step)
            """,
        ),
    ],
    "nested with, suppress": [
        after(
            LOSS,
            """
                with torch.no_grad(), suppress(KeyError):
                    {}['a']
                with suppress(KeyError):
                    with open('/dev/null') as file, torch.device('cpu'):
                        {}['b']
            """,
        ),
        after(IMPORT, "from contextlib import suppress"),
    ],
    "while/else": [
        after(
            LOSS,
            """
                tries, found = 3, None
                while tries:
                    tries -= 1
                    if tries == 7:
                        break
                else:
                    found = 'nothing'
                assert found == 'nothing'
            """,
        ),
    ],
    "local class, super and closure": [
        after(
            LOSS,
            """
                total = 0

                class Base:
                    kind = cfg.seed
                    def add(self, x):
                        nonlocal total
                        total += x

                class Meter(Base):
                    def add(self, x):
                        super().add(x)
                        return __class__.__name__

                assert Meter().add(3) == 'Meter' and total == 3
            """,
        ),
    ],
    "global statement": [
        after(
            LOSS,
            """
                global COUNT
                COUNT += 1
                assert counted() == COUNT
            """,
        ),
        before(
            ENTRYPOINT,
            """
                COUNT = 0


                def counted():
                    return COUNT
            """,
        ),
    ],
    "decorator under the entry": [
        after(ENTRYPOINT, "@noted"),
        before(
            ENTRYPOINT,
            """
                def noted(function):
                    @functools.wraps(function)
                    def call(*args, **kwargs):
                        return function(*args, **kwargs)
                    return call
            """,
        ),
        before(IMPORT, "import functools"),
    ],
    "decorator above the entry": [
        before(
            ENTRYPOINT,
            """
                def noted(function):
                    @functools.wraps(function)
                    def call(*args, **kwargs):
                        return function(*args, **kwargs)
                    return call


                @noted
            """,
        ),
        before(IMPORT, "import functools"),
    ],
    "loop in a helper": loop_in_a_helper,
    "optional import": [
        after(
            LOSS,
            """
                try:
                    import not_there_at_all as tracker
                except ImportError:
                    tracker = None
                with suppress(ImportError):
                    import not_there_either
                assert tracker is None
            """,
        ),
        after(IMPORT, "from contextlib import suppress"),
    ],
    "try/except/else/finally": [
        instead(
            BACKWARD,
            """
                try:
                    loss.backward()
                except torch.OutOfMemoryError:
                    loss = None
                else:
                    ok = True
                finally:
                    done = True
                if loss is None or not (ok and done):
                    continue
            """,
        ),
    ],
    "async function": [
        after(
            LOSS,
            """
                class Gate:
                    async def __aenter__(self):
                        return 1
                    async def __aexit__(self, *_):
                        return False

                async def ask():
                    async with Gate() as one:
                        return one + sum([each async for each in some()])

                async def some():
                    yield 2

                assert asyncio.run(ask()) == 3
            """,
        ),
        before(IMPORT, "import asyncio"),
    ],
    "while and next": [
        instead(
            LOOP,
            """
                steps = iter(run.steps(data, checkpointer, evaluator, seed=cfg.seed))
                while (item := next(steps, None)) is not None:
                    step, batch = item
            """,
        ),
    ],
    "own exception for control flow": [
        instead(
            BACKWARD,
            """
                try:
                    checked(batch)
                    loss.backward()
                except Skip:
                    continue
            """,
        ),
        before(
            ENTRYPOINT,
            """
                class Skip(Exception):
                    pass


                def checked(batch):
                    if len(batch.rows) < 0:
                        raise Skip
            """,
        ),
    ],
    "exception that is raised and caught": [
        after(
            LOSS,
            """
                try:
                    value = int('many')
                except ValueError as error:
                    value = len(str(error))
                assert value > 3
            """,
        ),
    ],
    "sys.exit() at the end": [
        after(DONE, "sys.exit()"),
        before(IMPORT, "import sys"),
    ],
    "best so far": [
        before(LOOP, "best = float('inf')"),
        after(
            ZERO_GRAD,
            """
                if total_loss < best:
                    best, best_step = total_loss.clone(), step
                run.info(f'best at {best_step}')
            """,
        ),
    ],
    "context manager that swallows": [
        before(
            BACKWARD,
            """
                with skipped():
                    if step == 1:
                        raise ValueError('this one is skipped')
            """,
        ),
        before(
            ENTRYPOINT,
            """
                @contextmanager
                def skipped():
                    try:
                        yield
                    except ValueError:
                        pass
            """,
        ),
        after(IMPORT, "from contextlib import contextmanager"),
    ],
    "division by a made-up number": [
        before(ACCEPTS, "gain = 1 / (1 - metrics['loss'])"),
    ],
    "index by a made-up number": [
        before(ACCEPTS, "low = ['a'][int(metrics['loss'])] if metrics['loss'] < 1.5 else 'b'"),
    ],
    "except*": [
        after(
            LOSS,
            """
                try:
                    raise ExceptionGroup('two', [ValueError(1), KeyError(2)])
                except* ValueError as group:
                    caught = len(group.exceptions)
                except* KeyError:
                    pass
                assert caught == 1
            """,
        ),
    ],
    "file around the loop": [
        before(
            LOOP,
            """
                with open('log.csv', 'w') as out:
                    out.write('step')
            """,
        ),
    ],
    "del and rebinding": [
        after(
            ZERO_GRAD,
            """
                del grad_norm, loss
                total_loss = None
            """,
        ),
    ],
    "match with captures": [
        after(
            LOSS,
            """
                match {'kind': 'a', 'more': [1, 2, 3]}:
                    case {'kind': 'b'}:
                        kind = 'b'
                    case {'kind': str(name), 'more': [one, *others]} if others:
                        kind = name + str(one + len(others))
                assert kind == 'a3'
            """,
        ),
    ],
    "recursion in a local function": [
        after(
            LOSS,
            """
                def count(module):
                    return 1 + sum(count(child) for child in module.children())

                assert count(model) > 3
            """,
        ),
    ],
    "loop until the loss is small": [
        after(
            ZERO_GRAD,
            """
                while not total_loss < 1e-9:
                    total_loss = total_loss / 2
            """,
        ),
    ],
    "return in with run": [
        before(
            LOOP,
            """
                if cfg.max_steps == 0:
                    return
            """,
        ),
    ],
    "main in try/except": around_main(PRINTED),
    "main in bare except": around_main(BARE),
    "main in try/finally": around_main(FINALLY),
    "main in except BaseException": around_main(ALL_OF_THEM),
    "decorator without wraps": [
        after(ENTRYPOINT, "@noted"),
        before(
            ENTRYPOINT,
            """
                def noted(function):
                    def call(cfg):
                        return function(cfg)
                    return call
            """,
        ),
    ],
    "deep nesting": [
        after(
            LOSS,
            """
                with torch.no_grad():
                    with torch.no_grad():
                        for i1 in range(1):
                            with torch.no_grad():
                                for i3 in range(1):
                                    with torch.no_grad():
                                        for i5 in range(1):
                                            with torch.no_grad():
                                                for i7 in range(1):
                                                    with torch.no_grad():
                                                        x = 1
                assert x == 1
            """,
        ),
    ],
    "own Run with __exit__": [
        (" run = Run(", " run = Own("),
        before(
            ENTRYPOINT,
            """
                class Own(Run):
                    def __exit__(self, *error):
                        return super().__exit__(*error)
            """,
        ),
    ],
    "autocast beside run": [
        ("    with run:  #", "    with run, torch.autocast('cpu', enabled=False):  #"),
    ],
    "two step loops": [
        before(
            FINISH,
            """
                for step, batch in run.steps(data, checkpointer, total=step):
                    pass
            """,
        ),
    ],
    "return of a value": [
        (DONE, f"{DONE}    return run.path\n"),
    ],
    "locals and frames": [
        after(
            LOSS,
            """
                import inspect
                assert inspect.currentframe().f_code.co_name == 'main' and inspect.currentframe().f_lineno > 40
                assert not [n for n in locals() if n.startswith('__')] and 'cfg' in vars()
                assert eval('cfg.seed', globals(), locals()) == 0
            """,
        ),
    ],
    "global loop variable": [
        after(
            LOSS,
            """
                global at
                for at in range(3):
                    pass
                assert at == 2 and globals()['at'] == 2
            """,
        ),
    ],
    "star target and item target": [
        after(
            LOSS,
            """
                state = {}
                for first, *rest in [(1, 2, 3), (4, 5, 6)]:
                    pass
                for state['i'] in range(3):
                    pass
                assert (first, rest, state) == (4, [5, 6], {'i': 2})
            """,
        ),
    ],
    "with target tuple": [
        after(
            LOSS,
            """
                with pair() as (a, [b, *c]):
                    pass
                assert (a, b, c) == (1, 2, [3])
            """,
        ),
        before(
            ENTRYPOINT,
            """
                @contextmanager
                def pair():
                    yield 1, [2, 3]
            """,
        ),
        after(IMPORT, "from contextlib import contextmanager"),
    ],
    "import within": [
        after(
            LOSS,
            """
                import json as js, os.path
                from collections import deque, OrderedDict as OD
                assert js.loads('1') == len(deque([0])) and os.path.sep and OD()  == {}
            """,
        ),
    ],
    "while walrus next": [
        after(
            LOSS,
            """
                lines = iter('abc')
                got = []
                while (line := next(lines, None)) is not None:
                    got.append(line)
                assert got == ['a', 'b', 'c']
            """,
        ),
    ],
    "for count until small": [
        after(
            ZERO_GRAD,
            """
                import itertools
                for _ in itertools.count():
                    if total_loss < 1e-9:
                        break
                    total_loss = total_loss / 2
            """,
        ),
    ],
    "helper until small": [
        after(ZERO_GRAD, "lowered(total_loss)"),
        before(
            ENTRYPOINT,
            """
                def lowered(loss):
                    while not loss < 1e-9:
                        try:
                            loss = loss / 2
                        except Exception:
                            continue
                    return loss
            """,
        ),
    ],
    "class that swallows": [
        before(
            BACKWARD,
            """
                with Skip(ValueError):
                    int('x')
            """,
        ),
        before(
            ENTRYPOINT,
            """
                class Skip:
                    def __init__(self, kind):
                        self.kind = kind
                    def __enter__(self):
                        return self
                    def __exit__(self, kind, *_):
                        return kind is not None and issubclass(kind, self.kind)
            """,
        ),
    ],
    "chosen context": [
        instead(
            BACKWARD,
            """
                with torch.enable_grad() if step else nullcontext():
                    loss.backward()
            """,
        ),
        after(IMPORT, "from contextlib import nullcontext"),
    ],
    "math.isnan(item)": [
        before(
            BACKWARD,
            """
                if math.isnan(loss.item()) or not math.isfinite(float(loss)) or np.isnan(loss.item()):
                    raise RuntimeError('nan')
            """,
        ),
        before(
            IMPORT,
            """
                import math
                import numpy as np
            """,
        ),
    ],
    "raise on item above": [
        before(
            BACKWARD,
            """
                value = loss.item()
                if 0.999 < value < 1.001:
                    raise ValueError('suspicious')
            """,
        ),
    ],
    "check in a helper": [
        before(
            BACKWARD,
            """
                check(loss.item(), 1e4)
                check(float(loss.detach()), 1e6)
            """,
        ),
        before(
            ENTRYPOINT,
            """
                def check(value, limit):
                    if value > limit:
                        raise ValueError('diverged')
            """,
        ),
    ],
    "helper raises for 1.0": [
        before(
            ACCEPTS,
            """
                low = 1 - metrics['loss']
                check(low, -0.1)
            """,
        ),
        before(
            ENTRYPOINT,
            """
                def check(value, limit):
                    if value > limit:
                        raise ValueError('diverged')
            """,
        ),
    ],
    "retry loop": [
        instead(
            BACKWARD,
            """
                while True:
                    try:
                        loss.backward()
                        break
                    except torch.OutOfMemoryError:
                        torch.cuda.empty_cache()
                        continue
            """,
        ),
    ],
    "from torch import save": [
        before(
            LOG,
            """
                save({'a': 1}, run.path / 'a.pt')
                import safetensors.torch as st
                st.save_file({'a': next(model.parameters()).detach().clone()}, run.path / 'x.safetensors')
            """,
        ),
        after(IMPORT, "from torch import save"),
    ],
    "files with numpy and json": [
        before(
            LOG,
            """
                (run.path / 'a.json').write_text(json.dumps({'loss': metrics['loss']}))
                np.save(run.path / 'a.npy', np.ones(3) * float(total_loss))
            """,
        ),
        before(
            IMPORT,
            """
                import json
                import numpy as np
            """,
        ),
    ],
    "gradients that are nan": [
        after(
            BACKWARD,
            """
                gradients = [parameter.grad for parameter in model.parameters()]
                has_nan = any(gradient.isnan().any() for gradient in gradients)
                if has_nan or not all(torch.isfinite(gradient).all() for gradient in gradients):
                    raise RuntimeError('nan gradient')
            """,
        ),
    ],
    "partial writes": [
        after(
            LOSS,
            """
                buffer = torch.empty(2, 3)
                buffer[0] = 1
                buffer[1] = 2
                assert buffer.sum() == 9
            """,
        ),
    ],
    "very large zeros": [
        after(
            LOSS,
            """
                mask = torch.zeros(30_000_000)
                assert mask.sum() == 0
            """,
        ),
    ],
    "error that is only printed": [
        after(
            LOSS,
            """
                try:
                    model.nothing()
                except Exception as error:
                    run.info(f'left out: {error}')
            """,
        ),
    ],
    "stop when good": [
        after(
            LOG,
            """
                if metrics['loss'] < 0.01:
                    run.info('good enough')
                    break
            """,
        ),
    ],
    "sum of nan": [
        before(
            BACKWARD,
            """
                bad = torch.isnan(loss).sum().item()
                if bad > 0:
                    raise ValueError(f'{bad} NaN')
                assert torch.isfinite(loss).float().mean() == 1
            """,
        ),
    ],
    "buffer written with a fake": [
        after(
            ZERO_GRAD,
            """
                kept = torch.zeros(2)
                kept[0] = total_loss
                assert kept[0] != 0
            """,
        ),
    ],
    "info of other objects": [after(LOG, "run.info(metrics)\nrun.info(step)")],
    "array of unknown numbers": [before(CLIP, "value = total_loss.numpy() + total_loss.cpu().numpy()")],
    "weights saved and read back": [
        after(
            LOG,
            """
            torch.save({"model": model.state_dict()}, run.path / "best.pt")
            model.load_state_dict(torch.load(run.path / "best.pt")["model"])
            """,
        ),
    ],
    "size of saved weights": [
        after(
            LOG,
            """
            torch.save(model.state_dict(), run.path / "now.pt")
            run.info(f"{(run.path / 'now.pt').stat().st_size:,} bytes")
            """,
        ),
    ],
    "weights saved in memory": [
        before(IMPORT, "import io\n"),
        after(
            LOG,
            """
            torch.save(model.state_dict(), buffer := io.BytesIO())
            buffer.seek(0)
            model.load_state_dict(torch.load(buffer))
            """,
        ),
    ],
    "metrics read back": [after(LOG, "lines = (run.path / 'metrics.jsonl').read_text().splitlines()")],
    "enumerated steps": [instead(LOOP, f"for count, (step, batch) in enumerate({STEPS}, 1):")],
    "steps of a progress bar": [
        instead(LOOP, f"for step, batch in Progress({STEPS}):"),
        before(
            ENTRYPOINT,
            """
            class Progress:
                def __init__(self, items):
                    self.items = items

                def __iter__(self):
                    for item in self.items:
                        yield item
                        print(".", end="")
            """,
        ),
    ],
    "steps next to other items": [instead(LOOP, f"for (step, batch), name in zip({STEPS}, iter('abcdefgh')):")],
    "a table of losses": [
        instead(
            LOOP,
            f"""
                steps = {STEPS}
                file = stack.enter_context((run.path / 'losses.csv').open('w'))
                for step, batch in steps:
            """,
        ),
        after(LOG, "file.write(f'{step},{metrics[\"loss\"]}')\nfile.flush()"),
        instead(
            WITH_RUN,
            "with ExitStack() as stack, run:",
        ),
        after(IMPORT, "from contextlib import ExitStack"),
    ],
    "numbers without gradients in inference mode": [
        before(
            LOG,
            """
            with torch.inference_mode():
                sums = torch.zeros(2, dtype=torch.float64)
                sums += torch.stack([total_loss, grad_norm]).cpu()
                low, high = sums.tolist()
                metrics["ratio"] = low / high
                metrics["largest"] = sums.max().item()
            """,
        ),
    ],
    "tensors that are read back": [
        before(IMPORT, "from safetensors.torch import load_file, save_file"),
        before(
            LOG,
            """
            save_file({"loss": total_loss.reshape(1)}, run.path / "loss.safetensors")
            metrics["again"] = load_file(run.path / "loss.safetensors")["loss"].item()
            """,
        ),
    ],
    "copies of tensors": [
        before(IMPORT, "import copy"),
        before(LOG, "kept = copy.deepcopy({'loss': total_loss, 'batch': batch.rows, 'sums': torch.zeros(3)})"),
    ],
    "file next to an export of another name": [
        after(DONE, "torch.save({'loss': total_loss}, run.path / 'policy' / 'head.pt')"),
        ('run.path / "model", source', 'run.path / "policy", source'),
    ],
    "folder of its own in the run folder": [
        before(
            LOG,
            """
            (run.path / "mine").mkdir(exist_ok=True)
            torch.save({"loss": total_loss}, run.path / "mine" / "loss.pt")
            """,
        ),
    ],
}


WRONG = {
    "method of a tensor": (
        [
            WRONG_BACKWARD,
        ],
        ["loss.backwards()"],
    ),
    "misspelled name": (
        [
            WRONG_SCHEDULE,
        ],
        ["scheduel.step()"],
    ),
    "method of the optimizer": (
        [
            ("optimizer.zero_grad()", "optimizer.zero_grads()"),
        ],
        ["zero_grads"],
    ),
    "setting": (
        [
            ("cfg.max_grad_norm", "cfg.max_gradnorm"),
        ],
        ["cfg.max_gradnorm"],
    ),
    "missing argument": (
        [
            ("metrics |= evaluator(step)", "metrics |= evaluator()"),
        ],
        ["metrics |= evaluator()"],
    ),
    "group of settings": (
        [
            ("loss_fn = instantiate(cfg.loss)", "loss_fn = instantiate(cfg.los)"),
        ],
        ["cfg.los)"],
    ),
    "index of a known tensor": (
        [
            ("total_loss += loss.detach()", "total_loss += loss.detach() + torch.ones(2)[5]"),
        ],
        ["torch.ones(2)[5]"],
    ),
    "attribute of the batch": (
        [
            ("/ batch.num_supervised", "/ batch.supervised"),
        ],
        ["batch.supervised"],
    ),
    "metric": (
        [
            ("run.log(step, batch, metrics)", "run.log(step, batch, metrics['learning_rate'])"),
        ],
        ["metrics['learning_rate']"],
    ),
    "use of None": (
        [
            ("weights.load(model)", "weights.load(model)[0]['a']"),
        ],
        ["weights.load(model)[0]"],
    ),
    "local before assignment: schedule": (
        [
            ("instantiate(cfg.schedule, optimizer, total_steps=len(data))", "schedule(optimizer, len(data))"),
            before(
                ENTRYPOINT,
                """
                def schedule(optimizer, steps):
                    return torch.optim.lr_scheduler.ConstantLR(optimizer)
            """,
            ),
        ],
        ["schedule = schedule("],
    ),
    "local before assignment: best": (
        [
            after(ZERO_GRAD, "best = max(best, step)"),
            before(ENTRYPOINT, "best = 0"),
        ],
        ["best = max("],
    ),
    "in try with another handler": (
        [
            instead(
                BACKWARD,
                """
                try:
                    loss.backwards()
                except torch.OutOfMemoryError:
                    continue
            """,
            ),
        ],
        ["loss.backwards()"],
    ),
    "two in a with and after it": (
        [
            after(
                LOSS,
                """
                with open('/dev/null') as file:
                    file.reed()
                    file.rite()
                optimizers.nothing()
            """,
            ),
        ],
        ["file.reed()", "file.rite()", "optimizers.nothing()"],
    ),
    "in a match": (
        [
            before(
                BACKWARD,
                """
                match step:
                    case 1:
                        batch.nothing()
                    case _:
                        pass
            """,
            ),
        ],
        ["batch.nothing()"],
    ),
    "in a while": (
        [
            after(
                LOSS,
                """
                n = 2
                while n:
                    n -= 1
                    model.nothing()
            """,
            ),
        ],
        ["model.nothing()"],
    ),
    "in for/else": (
        [
            after(
                SCHEDULE_STEP,
                """
                for each in range(3):
                    pass
                else:
                    batch.nothing()
            """,
            ),
        ],
        ["batch.nothing()"],
    ),
    "in a local function": (
        [
            after(
                LOSS,
                """
                def helped(x):
                    return x.nothing()

                helped(model)
            """,
            ),
        ],
        ["x.nothing()"],
    ),
    "in a helper with the loop": (edited(loop_in_a_helper, WRONG_BACKWARD), ["loss.backwards()"]),
    "not what suppress names": (
        [
            after(
                LOSS,
                """
                with suppress(KeyError):
                    model.nothing()
            """,
            ),
            after(IMPORT, "from contextlib import suppress"),
        ],
        ["model.nothing()"],
    ),
    "in a finally": (
        [
            instead(
                BACKWARD,
                """
                try:
                    loss.backward()
                finally:
                    batch.nothing()
            """,
            ),
        ],
        ["batch.nothing()"],
    ),
    "in a handler that is entered": (
        [
            after(
                LOSS,
                """
                try:
                    int('x')
                except ValueError:
                    model.nothing()
            """,
            ),
        ],
        ["model.nothing()"],
    ),
    "variable of a comprehension": (
        [
            after(
                LOSS,
                """
                [each for each in range(3)]
                print(each)
            """,
            ),
        ],
        ["print(each)"],
    ),
    "body of a local class": (
        [
            after(
                LOSS,
                """
                class Own:
                    size = model.nothing
            """,
            ),
        ],
        ["size = model.nothing"],
    ),
    "decorator of a local function": (
        [
            after(
                LOSS,
                """
                @torch.no_grda()
                def helped(x):
                    return x
            """,
            ),
        ],
        ["torch.no_grda()"],
    ),
    "arguments of a lambda": (
        [
            after(
                LOSS,
                """
                double = lambda x: 2 * x
                double(1, 2)
            """,
            ),
        ],
        ["double(1, 2)"],
    ),
    "unconditional raise in the loop": (
        [
            before(LOG, "raise NotImplementedError('to do')"),
        ],
        ["raise NotImplementedError"],
    ),
    "shapes after a guard": (
        [
            before(
                BACKWARD,
                """
                if not torch.isfinite(loss):
                    continue
                loss = loss * torch.ones(3) @ torch.ones(4)
            """,
            ),
        ],
        ["torch.ones(4)"],
    ),
    "global that is not there": (
        [
            after(
                LOSS,
                """
                global COUNT
                COUNT += 1
            """,
            ),
        ],
        ["COUNT += 1"],
    ),
    "in an async function": (
        [
            after(
                LOSS,
                """
                async def ask():
                    return model.nothing()

                asyncio.run(ask())
            """,
            ),
            before(IMPORT, "import asyncio"),
        ],
        ["model.nothing()"],
    ),
    "raised again by a handler": (
        [
            after(
                LOSS,
                """
                try:
                    model.nothing()
                except AttributeError:
                    raise
            """,
            ),
        ],
        ["model.nothing()"],
    ),
    "raise on a known number": (
        [
            after(
                LOSS,
                """
                if len(data) > 1:
                    raise ValueError('too many')
            """,
            ),
        ],
        ["raise ValueError('too many')"],
    ),
    "under a guard of a made-up number": (
        [
            after(
                CLIP,
                """
                if torch.isfinite(grad_norm):
                    world.nothing()
            """,
            ),
        ],
        ["world.nothing()"],
    ),
    "unpacking": (
        [
            after(LOSS, "a, b = 1, 2, 3"),
        ],
        ["a, b = 1, 2, 3"],
    ),
    "iterable of a loop": (
        [
            after(
                LOSS,
                """
                for each in model.nothing():
                    optimizers.nothing()
            """,
            ),
        ],
        ["model.nothing()", "optimizers.nothing("],
    ),
    "consequence in a guard": (
        [
            after(
                LOSS,
                """
                bonus = model.nothing()
                if not bonus:
                    raise ValueError('no bonus')
                names = [each.name for each in bonus]
                if bonus.size == 0:
                    first = 1
                else:
                    first = bonus.first
                print(first)
            """,
            ),
        ],
        ["model.nothing()"],
    ),
    "main in try/except": (edited(around_main(PRINTED), WRONG_BACKWARD), ["loss.backwards()"]),
    "main in try/finally": (
        edited(around_main(FINALLY), WRONG_BACKWARD, WRONG_SCHEDULE),
        ["loss.backwards()", "scheduel.step()"],
    ),
    "deep nesting": (
        [
            after(
                LOSS,
                """
                with torch.no_grad():
                    with torch.no_grad():
                        for i1 in range(1):
                            with torch.no_grad():
                                for i3 in range(1):
                                    with torch.no_grad():
                                        for i5 in range(1):
                                            with torch.no_grad():
                                                for i7 in range(1):
                                                    with torch.no_grad():
                                                        model.nothing()
            """,
            ),
        ],
        ["model.nothing()"],
    ),
    "raise on a setting": (
        [
            after(
                LOSS,
                """
                if cfg.optimizer.lr < 1:
                    raise ValueError('too low')
            """,
            ),
        ],
        ["raise ValueError('too low')"],
    ),
    "unbound on a known branch": (
        [
            after(
                ZERO_GRAD,
                """
                if step == 7:
                    seven = 1
                print(seven)
            """,
            ),
        ],
        ["print(seven)"],
    ),
    "index of a known list": (
        [
            after(ZERO_GRAD, "print([1, 2][len(batch.rows)])"),
        ],
        ["print([1, 2]["],
    ),
    "division by a known zero": (
        [
            after(ZERO_GRAD, "print(1 / (len(batch.rows) - 8))"),
        ],
        ["print(1 / (len("],
    ),
    "assert on known numbers": (
        [
            after(ZERO_GRAD, "assert batch.num_supervised < 0, 'no'"),
        ],
        ["assert batch.num_supervised < 0"],
    ),
    "own Run with a wrong method": (
        [
            (" run = Run(", " run = Own("),
            before(
                ENTRYPOINT,
                """
                class Own(Run):
                    def log(self, *given):
                        super().logg(*given)
            """,
            ),
        ],
        ["super().logg(*given)"],
    ),
    "with target": (
        [
            after(
                LOSS,
                """
                with open('/dev/null') as (a, b, c):
                    pass
                optimizers.nothing()
            """,
            ),
        ],
        ["optimizers.nothing()", "with open('/dev/null') as (a"],
    ),
    "decorator without wraps": (
        [
            after(ENTRYPOINT, "@noted"),
            before(
                ENTRYPOINT,
                """
                def noted(function):
                    def call(cfg):
                        return function(cfg)
                    return call
            """,
            ),
            WRONG_SCHEDULE,
        ],
        ["scheduel.step()"],
    ),
    "in the decorator": (
        [
            after(ENTRYPOINT, "@noted"),
            before(
                ENTRYPOINT,
                """
                def noted(function):
                    def call(cfg):
                        return function(cfg, cfg.nothing_like_it)
                    return call
            """,
            ),
        ],
        ["return function(cfg, cfg.nothing"],
    ),
    "three in the loop, one in a handler": (
        [
            WRONG_SCHEDULE,
            ("optimizer.zero_grad()", "optimizer.zero_grads()"),
            instead(
                BACKWARD,
                """
                try:
                    loss.backward()
                    raise KeyError('a')
                except KeyError as error:
                    error.nothing()
            """,
            ),
        ],
        ["scheduel.step()", "zero_grads", "error.nothing()"],
    ),
    "after a guard on a made-up number": (
        [
            before(
                ACCEPTS,
                """
                assert metrics['loss'] < 0.9
                world.nothing()
            """,
            ),
        ],
        ["world.nothing()"],
    ),
    "sys.exit with a message": (
        [
            after(LOSS, "sys.exit('no data')"),
            before(IMPORT, "import sys"),
        ],
        ["sys.exit('no data')"],
    ),
    "after step 1 only": (
        [
            after(
                ZERO_GRAD,
                """
                if step == 1:
                    model.nothing()
            """,
            ),
        ],
        ["model.nothing()"],
    ),
    "mean that is never set": ([before(LOG, "smooth = 0.9 * smooth + 0.1 * metrics['loss']")], ["smooth = 0.9"]),
    "sum that is never set": ([before(LOG, "total += metrics['loss']")], ["total += metrics"]),
    "best that is never set": (
        [before(LOG, "if metrics['loss'] < best:\n    best = metrics['loss']")],
        ["if metrics['loss'] < best:"],
    ),
    "mean that a helper never sets": (
        [
            before(
                ENTRYPOINT,
                """
                def smooth(value, weight=0.9):
                    mean = weight * mean + (1 - weight) * value
                    return mean
                """,
            ),
            before(LOG, "metrics['smooth'] = smooth(metrics['loss'])"),
        ],
        ["mean = weight * mean"],
    ),
    "last of an empty list": (
        [
            before(LOOP, "history = []"),
            before(LOG, "metrics['change'] = metrics['loss'] - history[-1]\nhistory.append(metrics['loss'])"),
        ],
        ["- history[-1]"],
    ),
    "pop of an empty list": (
        [before(LOOP, "history = []"), before(LOG, "previous = history.pop()\nhistory.append(metrics['loss'])")],
        ["history.pop()"],
    ),
    "format of an integer": ([after(LOG, "print(f'{metrics[\"loss\"]:d}')")], [":d}"]),
    "text that is no number": ([before(LOG, "value = float(f'{metrics[\"loss\"]:.2f} nats')")], [" nats"]),
    "two names for one number": ([before(LOG, "low, high = [metrics['loss']]")], ["low, high ="]),
    "dimension that is not there": ([before(CLIP, "total_loss = total_loss.mean(dim=1)")], ["mean(dim=1)"]),
    "index of a number": ([before(CLIP, "total_loss = total_loss[:, 0]")], ["total_loss[:, 0]"]),
    "types of a product": (
        [
            after(
                LOSS,
                """
                plain_loss = loss_fn

                def loss_fn(hidden, weight, batch, **softcap):
                    scores = hidden.double() @ weight[:3].T
                    return plain_loss(hidden, weight, batch, **softcap) + scores.sum()
                """,
            )
        ],
        ["hidden.double() @"],
    ),
    "types of values that are put": (
        [
            before(
                CLIP,
                "bins = torch.zeros(3, device=world.device)\nbins[total_loss.long().view(1) % 3] = total_loss.double()",
            )
        ],
        ["bins[total_loss"],
    ),
    "function that cannot be saved": (
        [before(LOG, "torch.save({'rule': lambda value: value + 1}, run.path / 'rule.pt')")],
        ["lambda value"],
    ),
    "number in save_file": (
        [
            before(IMPORT, "from safetensors.torch import save_file"),
            before(LOG, "save_file({'loss': metrics['loss']}, run.path / 'loss.safetensors')"),
        ],
        ["save_file({"],
    ),
    "folder that nobody made": (
        [before(LOG, "torch.save(total_loss, run.path / 'heads' / '1.pt')")],
        ["'heads'"],
    ),
    "file before the run folder": (
        [before(WITH_RUN, "table = open(run.path / 'table.csv', 'w')")],
        ["'table.csv'"],
    ),
}
