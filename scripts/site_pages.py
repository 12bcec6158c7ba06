"""A hook with which MkDocs makes a site of this repository (see ``mkdocs.yml``).

Pages link to each other, and to sources, by their paths in the repository. Pages outside ``docs`` become pages of the
site if they are in the navigation. Any other file that a page links to becomes a page that shows the file.
"""

import functools
import importlib
import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
DOCS = "docs/"
# Pages in addition to those in docs.
OUTSIDE = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(
        path.relative_to(ROOT).as_posix()
        for path in sorted(ROOT.glob("[a-z]*/README.md"))
    ),
]
LINK = re.compile(r"(\]\()([^()\s]+)(\))")
# Names and tests on the page of claims.
FUNCTION = re.compile(r"`(jaxcoded\.[\w.]+)`")
TEST = re.compile(r"`([\w/]+\.py)(::\w+)`")
CLAIMS = "docs/trust.md"
COMMANDS = "docs/reference/command-line.md"
FENCE = re.compile(
    r"(^ *(?:```|~~~).*?^ *(?:```|~~~) *$|`[^`\n]+`)", re.MULTILINE | re.DOTALL
)
CODE = re.compile(r"<(pre|code)\b.*?</\1>", re.DOTALL)


def place(name: str) -> str:
    """Return the path of a repository file on the site, relative to ``docs``."""
    if name == "README.md":
        return "index.md"
    if name.startswith(DOCS):
        return name.removeprefix(DOCS)
    if name in OUTSIDE:
        return name.replace("/README.md", ".md").lower()
    return f"files/{name}.md"


def origin(page: str) -> str:
    """Return the repository file from which a page is made."""
    return next((name for name in OUTSIDE if place(name) == page), DOCS + page)


def linked(name: str, text: str) -> set[str]:
    """Return the repository files that a repository file links to."""
    targets = {match[2].partition("#")[0] for match in LINK.finditer(text)}
    paths = {
        posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        for target in targets
        if target and not re.match(r"[a-z]+:", target)
    }
    if name == CLAIMS:
        paths |= {f"tests/{match[1]}" for match in TEST.finditer(text)}
    return {path for path in paths if (ROOT / path).is_file()}


def shown(name: str) -> str:
    """Return a page that shows a file."""
    kind = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".yml": "yaml"}
    fence = f"````{kind.get(pathlib.Path(name).suffix, 'text')}"
    text = (ROOT / name).read_text(encoding="utf-8")
    return f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n{fence}\n{text}\n````\n"


def helped() -> Iterator[str]:
    """Return the help text of each command."""
    import click

    from jaxcoded.tools.cli import main

    parent = click.Context(
        main.main, info_name="jaxcoded", **main.main.context_settings
    )
    for name in main.COMMANDS:
        command = importlib.import_module(f"jaxcoded.tools.cli.{name}").command
        context = click.Context(command, parent, info_name=name, max_content_width=88)
        yield f"\n## {name}\n\n```text\n{command.get_help(context)}\n```\n"


def on_config(config: Any) -> Any:
    listed = re.findall(r"[\w/.-]+\.md", str(config["nav"]))
    missing = [
        name
        for name in [
            *OUTSIDE,
            *(p.relative_to(ROOT).as_posix() for p in sorted(ROOT.glob("docs/*.md"))),
        ]
        if name.removeprefix(DOCS) not in listed
    ]
    groups = {next(iter(group)): group for group in config["nav"]}
    groups["How-to"]["How-to"] += [name.removeprefix(DOCS) for name in missing]
    config["nav"] = _placed(config["nav"])
    return config


def _placed(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_placed(each) for each in nav]
    if isinstance(nav, dict):
        return {title: _placed(each) for title, each in nav.items()}
    return place(nav) if nav in OUTSIDE else nav


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File, InclusionLevel

    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in [*map(ROOT.joinpath, OUTSIDE), *sorted(ROOT.glob("docs/**/*.md"))]
    }
    for name in OUTSIDE:
        files.append(File.generated(config, place(name), content=texts[name]))
    sources = set().union(*(linked(name, text) for name, text in texts.items()))
    for name in sorted(sources):
        if name not in texts and not name.startswith(DOCS):
            file = File.generated(
                config,
                place(name),
                content=shown(name),
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = page.file.src_uri
    if path.startswith("files/"):
        return markdown
    name, folder = origin(path), posixpath.dirname(path)
    if name == CLAIMS:
        markdown = FUNCTION.sub(r"[`\1`][\1]", markdown)
        return TEST.sub(
            lambda match: f"[`{match[1]}` `{match[2]}`](files/tests/{match[1]}.md)",
            LINK.sub(functools.partial(_moved, name, folder), markdown),
        )

    if name == COMMANDS:
        markdown += "".join(helped())
    parts = FENCE.split(markdown)
    # the text between fences
    parts[::2] = [
        LINK.sub(functools.partial(_moved, name, folder), part) for part in parts[::2]
    ]
    return "".join(parts).replace("<BLANKLINE>", "")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Turn names in backticks into code, which the renderer omits if it splits a
    docstring.
    """
    from mkdocs.exceptions import PluginError

    if match := re.search(r"[^\n]*``[^\n]*", CODE.sub("", html)):
        raise PluginError(
            f"{page.file.src_uri}: backticks are left over: {match[0].strip()}"
        )
    return html


def _moved(name: str, folder: str, match: re.Match[str]) -> str:
    """Return a file's link as it must be on the file's page, which is in a folder of the site."""
    target, hash, anchor = match[2].partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if not target or re.match(r"[a-z]+:", target) or not (ROOT / path).is_file():
        return match[0]
    to = posixpath.relpath(place(path), folder or ".")
    return f"{match[1]}{to}{hash}{anchor}{match[3]}"
