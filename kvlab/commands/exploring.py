"""One page to look at and to mail: explore."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlab.commands import options
from kvlab.commands.options import Device, Dtype, Model
from kvlab.errors import KvlabError
from kvlab.lib import policy_names

app = typer.Typer()


@app.command(
    epilog="Examples:   kvlab explore sotu/1962 --tokens 1500   |   "
    "kvlab explore my.txt --policies snapkv,dapq,mine --budget 64,128 --out why.html   |   "
    "kvlab explore code/argparse --tokens 2000 --budget 0.1 --no-open"
)
def explore(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="A document (`kvlab list documents`) or a text file.")],
    policies: Annotated[
        str, typer.Option("--policies", help="Two to four, with commas between them: `kvlab list policies`.")
    ] = "snapkv,dapq",
    budget: Annotated[
        str,
        typer.Option(
            "--budget", help="Budgets to choose from: entries, or fractions of the prompt. The first is shown."
        ),
    ] = "128",
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Cut the text to its first tokens.", show_default="all of it")
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Length of the greedy response.")] = 32,
    effects: Annotated[
        bool, typer.Option("--effects", help="Measure what each loss costs under the first policy, and colour by it.")
    ] = False,
    model: Model = "smollm2-135m",
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", help="The HTML file (default: TEXT.html here).", show_default=False)
    ] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Write one HTML page: what policies keep of a text, and where a query's attention is lost.

    The page needs no kernel and no network: mail it, or open it on a phone. Its address names the view.
    """
    names = options.names(policies)
    policy_names.check(names)
    policy_names.check_page(names)
    asked = options.numbers(budget, "--budget", options.entries)
    if not asked or min(asked) <= 0:
        raise KvlabError(f"--budget {budget} names no budget: give entries such as 128, or a fraction such as 0.1")
    path = out or Path(re.sub(r"[^\w.-]+", "-", Path(text).stem if Path(text).exists() else text) + ".html")
    options.check_out(path)
    from kvlab.inputs import corpus

    document = corpus.document(text)
    from kvlab.methods import has_budget
    from kvlab.methods import policy as made

    objects = [made(name, **({"budget": asked[0]} if has_budget(name) else {})) for name in names]
    from kvlab.inputs import models
    from kvlab.render.explorer.explore import explore as explored
    from kvlab.traces.run import capture

    lm = models.load(model, device=device, dtype=dtype)
    document = document if tokens is None else document.window(lm, tokens)
    length = document.tokens(lm)
    if max(asked) >= length:
        raise KvlabError(
            f"a budget of {max(asked)} is not below the text's {length:,} tokens, so nothing is evicted; "
            "give a smaller --budget or a longer text"
        )
    trace = capture(lm, document, new_tokens, policies=names)
    stops = [entries if isinstance(entries, int) else int(entries * trace.prompt_length) for entries in asked]
    why = None
    if effects:
        from kvlab.attribution.attribute import attribute

        first = objects[0].replace(budget=stops[0]) if has_budget(names[0]) else objects[0]
        why = attribute(lm, first, trace)
    view = explored(trace, *names[:2], budgets=stops, budget=stops[0], lm=lm, effects=why)
    view.save(path, policies=names)
    view.close()
    typer.echo(view.finding())
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    if show and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(path.absolute().as_uri())
