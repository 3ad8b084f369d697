# size: one command in a module of its own, imported when it is called
"""`nearkin completion`: completion scripts for shells, made by click.

The script calls `nearkin` with COMPLETION_VARIABLE set; `complete` then answers instead of a command.
"""

from __future__ import annotations

import click

from nearkin.cli.session import AsWritten, current_session, json_option

COMPLETION_VARIABLE = "_NEARKIN_COMPLETE"
INSTALL = {
    "bash": "nearkin completion bash > ~/.local/share/bash-completion/completions/nearkin",
    "zsh": "nearkin completion zsh > ~/.zfunc/_nearkin   # with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc",
    "fish": "nearkin completion fish > ~/.config/fish/completions/nearkin.fish",
}


@click.command(cls=AsWritten)
@click.argument("shell", type=click.Choice(list(INSTALL)))
@json_option
def completion(shell: str) -> None:
    """Print a completion script for a shell.

    nearkin completion bash > ~/.local/share/bash-completion/completions/nearkin
    nearkin completion zsh > ~/.zfunc/_nearkin       # with fpath+=~/.zfunc before compinit in ~/.zshrc
    nearkin completion fish > ~/.config/fish/completions/nearkin.fish
    source <(nearkin completion bash)                # for this bash alone

    A new shell completes then.
    """
    from click.shell_completion import get_completion_class

    from nearkin.cli.commands import nearkin
    from nearkin.cli.output import print_json, print_line

    found = get_completion_class(shell)
    assert found is not None  # click has all of INSTALL
    # not `source`: of bash it first runs the bash on PATH to look at its version
    maker = found(nearkin, {}, "nearkin", COMPLETION_VARIABLE)
    script = (maker.source_template % maker.source_vars()).strip()
    if current_session().as_json:
        print_json({"shell": shell, "script": script, "install": INSTALL[shell]})
    else:
        print_line(f"{script}\n\n# install: {INSTALL[shell]}")


def complete(instruction: str) -> int:
    """Answer a completion script and return the exit code.

    `instruction` is the value of COMPLETION_VARIABLE that the script has set.
    """
    from click.shell_completion import shell_complete

    from nearkin.cli.commands import nearkin

    return shell_complete(nearkin, {}, "nearkin", COMPLETION_VARIABLE, instruction)
