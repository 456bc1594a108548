"""`mpishard config`: what compilers of C and Fortran hosts need."""

from __future__ import annotations

import click

from mpishard.errors import JobError


@click.command()
@click.option("--build", "folder", metavar="DIR", required=True, help="Where they are, or go: compiled if not current.")
@click.option("--cflags", is_flag=True, help="Print what a compiler needs.")
@click.option("--libs", is_flag=True, help="Print what a linker needs.")
@click.option("--link", is_flag=True, help="Side by side alone: no Python in the program.")
def config(folder: str, cflags: bool, libs: bool, link: bool) -> None:
    """Compile the libraries for C and Fortran hosts, and say how to use them."""
    from mpishard.insitu.build import build

    try:
        built = build(folder, link=link)
    except OSError as error:
        raise JobError("--build", expected="a folder that can be written", got=error, fix="name another one") from None
    if cflags or libs:
        click.echo(" ".join([*[built.cflags] * cflags, *[built.libs] * libs]))
