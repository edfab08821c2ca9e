"""The command `stallfree`. Heavy things are imported by the command that needs them, so that help comes at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cluster.config import SEPARATED_ONLY
from deploy.commands.bench import bench
from deploy.commands.compare import LEFT_OUT as LEFT_OUT_OF_COMPARE
from deploy.commands.compare import compare
from deploy.commands.demo import demo
from deploy.commands.fetch import fetch
from deploy.commands.key import key
from deploy.commands.plan import plan
from deploy.commands.serve import serve
from deploy.commands.simulate import LEFT_OUT, simulate
from deploy.commands.trace import trace
from deploy.errors import CommandError, one_line
from deploy.load_options import with_load_options
from deploy.options import with_engine_options

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"stallfree {version('stallfree')}")
        raise typer.Exit


@app.callback()
def stallfree(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLM serving on Ray that keeps running streams running when a long prompt comes."""


app.command()(with_engine_options(serve))
app.command()(with_engine_options(demo, leave_out=frozenset({"policy", "mode", *SEPARATED_ONLY})))
app.command()(fetch)
app.command()(key)
app.command()(plan)
app.command()(with_engine_options(with_load_options(simulate), leave_out=LEFT_OUT))
app.command()(trace)
app.command()(with_load_options(bench))
app.command()(with_engine_options(with_load_options(compare), leave_out=LEFT_OUT_OF_COMPARE))


def run(arguments: list[str]) -> int:
    """The exit code: 0, 2 where the call is wrong, 1 for any other failure; one line on standard error says why."""
    try:
        code = app(arguments or ["--help"], prog_name="stallfree", standalone_mode=False)
    except CommandError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except typer.Abort:
        return 1
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _complain(error.format_message(), getattr(error, "exit_code", 2))
    return code if isinstance(code, int) else 0


def _complain(message: str, exit_code: int) -> int:
    hint = " (see --help)" if exit_code == 2 else ""
    print(f"stallfree: {one_line(message).rstrip('.')}{hint}", file=sys.stderr, flush=True)
    return exit_code


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
