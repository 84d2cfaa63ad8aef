"""Hook of `mkdocs.yml`: pages of the site from files outside docs/.

Sources: README, benchmarks, layouts, public names, examples. Invariants: every public name owns a
single entry in the API reference, made from `__all__`; a link to a file with a page on the site
leads to the page, a link to a different file of the repository stays as text.
"""

from __future__ import annotations

import ast
import functools
import itertools
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

#: Files beside their subject in the repository, with their place on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/README.md": "benchmarks.md",
    "examples/first_hour.ipynb": "first_hour.ipynb",
    "shmbus_ext/LAYOUT.md": "layout.md",
    "shmbus_ext/pool/LAYOUT.md": "pool-layout.md",
    "shmbus_ext/channel/LAYOUT.md": "channel-layout.md",
}

#: Page of the API reference: (title, first sentence, modules with the listed `__all__`).
REFERENCE = {
    "shmbus": ("shmbus", "The bus: what workers, trainers and operators import.", ["shmbus"]),
    "batch": (
        "shmbus.batch",
        "Many trajectories at once, for those who pack batches themselves.",
        ["shmbus.batch.gather"],
    ),
    "trainer": ("trainer_adapter", "What a training loop imports.", ["trainer_adapter"]),
    "objectives": (
        "Advantages and losses",
        "From scores to gradients, with the source of each formula.",
        [
            "trainer_adapter.advantages",
            "trainer_adapter.logprobs",
            "trainer_adapter.losses",
            "trainer_adapter.mismatch",
            "trainer_adapter.corrections",
            "trainer_adapter.scored_group",
        ],
    ),
    "batches": (
        "Micro-batches, balance, compatibility",
        "What stands between a batch and a model.",
        ["trainer_adapter.microbatch", "trainer_adapter.balance", "trainer_adapter.compat"],
    ),
    "attention": (
        "trainer_adapter.attention",
        "Attention over packed rows that keeps sequences apart.",
        ["trainer_adapter.attention"],
    ),
    "weights": (
        "shmbus.weights",
        "Weights back to inference: publishers, subscribers, carriers.",
        ["shmbus.weights"],
    ),
    "channel": (
        "shmbus.tensors",
        "Tensors of a step, from one process to one other.",
        ["shmbus.tensors"],
    ),
    "relay": (
        "shmbus.relay",
        "Complete groups between the buses of a Ray cluster.",
        ["shmbus.relay"],
    ),
    "peers": (
        "Atropos",
        "Its environments and trainers on a bus.",
        [
            "shmbus.peers.atropos",
            "trainer_adapter.adapters.atropos",
        ],
    ),
    "trl": ("TRL", "Rollouts and weights of TRL's trainers.", ["trainer_adapter.adapters.trl"]),
    "engines": (
        "shmbus.engines",
        "Inference servers that get new weights whole, or not at all.",
        ["shmbus.engines"],
    ),
    "errors": (
        "Error classes",
        "Fields of each class; [errors and drops](../errors.md) has messages, causes and cures.",
        [],
    ),
}

#: Stubs with more text than their module: classes in C.
STUBS = ("shmbus_ext._public", "shmbus_ext._public_put")

#: Navigation by reader: the pages of a tab, in order. A tab's last list forms a group.
TABS: dict[str, list[str]] = {
    "Start": [
        "index.md",
        "first-hour.md",
        "faq.md",
        "errors.md",
        "gains.md",
        "benchmarks.md",
        "glossary.md",
    ],
    "Trainer": ["trainer.md", "schema.md", "tuning.md"],
    "Weights": ["weights.md", "vllm.md", "colocation.md"],
    "Agents and adapters": ["agents.md", "gateway.md", "adapters/README.md"],
    "Operate": [
        "operating.md",
        "page.md",
        "relay.md",
        "reliability.md",
        "security.md",
        "compat.md",
    ],
    "Reference": [],
    "Inside": [
        "architecture.md",
        "layout.md",
        "pool-layout.md",
        "channel-layout.md",
        "contributing.md",
        "changelog.md",
        "decisions/README.md",
    ],
}
#: Tab of a folder's pages, with a group inside the tab or "".
FOLDERS = {
    "adapters": ("Agents and adapters", ""),
    "api": ("Reference", ""),
    "decisions": ("Inside", "Decisions"),
    "examples": ("Start", "Examples"),
}
#: Short names for the navigation; the default is an example's file name or a page's heading.
TITLES = {
    "index.md": "Overview",
    "first-hour.md": "First hour",
    "faq.md": "FAQ",
    "errors.md": "Errors and drops",
    "gains.md": "What a run gains",
    "benchmarks.md": "Benchmarks",
    "trainer.md": "Trainer",
    "schema.md": "Fields and schema",
    "tuning.md": "Tuning",
    "weights.md": "Weights",
    "vllm.md": "A run with vLLM",
    "colocation.md": "Tensor channels",
    "agents.md": "Agents",
    "gateway.md": "Atropos gateway",
    "adapters/README.md": "All adapters",
    "adapters/trl.md": "TRL",
    "adapters/verl.md": "verl",
    "adapters/prime-rl.md": "prime-rl",
    "adapters/others.md": "Others",
    "page.md": "Page in a browser",
    "relay.md": "Several nodes",
    "reliability.md": "Reliability",
    "security.md": "Security",
    "compat.md": "Versions",
    "architecture.md": "Architecture",
    "layout.md": "Layout of a bus",
    "pool-layout.md": "Layout of a pool",
    "channel-layout.md": "Layout of a channel",
    "decisions/README.md": "All decisions",
}
#: Weight of a folder or page in the search: an example's title must not outrank the guide.
SEARCH_BOOST = {
    "examples": 0.1,
    "decisions": 0.1,
    "api": 0.3,
    "adapters": 0.3,
    "benchmarks.md": 0.3,
}

#: Tables with more columns become cards, a row each, on a phone (site.css).
MOST_COLUMNS = 3
LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\])\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and their pictures."""
    made = {uri: (ROOT / source).read_text() for source, uri in ELSEWHERE.items()}
    made |= {f"api/{page}.md": _reference_page(page) for page in REFERENCE}
    made |= {
        f"examples/{path.stem}.md": _example_page(path)
        for path in sorted((ROOT / "examples").glob("*.py"))
    }
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    for picture in sorted((ROOT / "bench" / "results").rglob("*")):
        if picture.suffix in (".svg", ".png"):
            uri = picture.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(picture)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Sort the pages into tabs and groups, under short names."""
    order = [uri for uris in TABS.values() for uri in uris] + [
        f"api/{page}.md" for page in REFERENCE
    ]
    rank = {uri: place for place, uri in enumerate(order)}
    tabs = {name: Section(name, []) for name in TABS}
    groups: dict[str, Section] = {}
    pages = sorted(nav.pages, key=lambda p: (rank.get(p.file.src_uri, len(rank)), p.file.src_uri))
    for page in pages:
        uri = page.file.src_uri
        tab, group = _place(uri)
        if group and group not in groups:
            groups[group] = Section(group, [])
            groups[group].parent = tabs[tab]
        page.parent = groups[group] if group else tabs[tab]
        page.parent.children.append(page)
        if uri.startswith("examples/"):
            page.title = posixpath.basename(uri).replace(".md", ".py")
        elif uri in TITLES:
            page.title = TITLES[uri]
    for section in groups.values():
        section.parent.children.append(section)
    nav.items = list(tabs.values())
    nav.pages = [page for tab in nav.items for page in _pages_of(tab)]
    for page, before, after in zip(
        nav.pages, [None, *nav.pages], [*nav.pages[1:], None], strict=False
    ):
        page.previous_page, page.next_page = before, after
    return nav


def _place(uri: str) -> tuple[str, str]:
    """Return the tab and the group of a page."""
    for tab, uris in TABS.items():
        if uri in uris and not uri.startswith("decisions/"):
            return tab, ""
    folder = posixpath.dirname(uri)
    if folder not in FOLDERS:
        raise LookupError(f"docs/site.py: TABS names no tab for {uri}")
    return FOLDERS[folder]


def _pages_of(section: Section) -> list[Page]:
    """Return the pages of a section and its groups, in order."""
    return [
        page
        for child in section.children
        for page in (_pages_of(child) if isinstance(child, Section) else [child])
    ]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Set the search weight of the page, and lead links between repository files to pages."""
    uri = page.file.src_uri
    page.meta["search"] = {
        "boost": SEARCH_BOOST.get(uri, SEARCH_BOOST.get(posixpath.dirname(uri), 3))
    }
    source = {site: path for path, site in ELSEWHERE.items()}.get(uri, f"docs/{uri}")
    if source.startswith("docs/examples/") or source.startswith("docs/api/"):
        return markdown

    def lead(match: re.Match[str]) -> str:
        label, target = match.groups()
        sign, _, shown = label.partition("[")
        label = f"{sign}[{LINK.sub(lead, shown[:-1])}]"  # a picture may be the label of a link
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match.group()
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / there).exists():
            return f"{label}({target})"  # a broken link: mkdocs says so
        found = _site_uri(there, files)
        if found is None:
            return label.lstrip("!")[1:-1]
        return f"{label}({posixpath.relpath(found, posixpath.dirname(uri) or '.')}{hash_}{anchor})"

    return LINK.sub(lead, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give the cells of a wide table their column's name."""

    def label(match: re.Match[str]) -> str:
        table = match.group()
        names = [
            re.sub(r"<[^>]+>", "", cell)
            for cell in re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.S)
        ]
        if len(names) <= MOST_COLUMNS:
            return table
        columns = itertools.cycle(names)
        labelled = re.sub(
            r"<td\b",
            lambda _: f'<td data-label="{next(columns).replace(chr(34), "&quot;")}"',
            table,
        )
        return labelled.replace("<table", "<table data-wide", 1)

    return re.sub(r"<table>.*?</table>", label, html, flags=re.S)


def _site_uri(path: str, files: Files) -> str | None:
    """Return the site's address of a file or folder of the repository."""
    if path.startswith("examples/") and path.endswith(".py"):
        path = f"docs/{path[:-3]}.md"
    for candidate in (ELSEWHERE.get(path), path, path.removeprefix("docs/")):
        found = files.get_file_from_path(candidate) if candidate else None
        if found is not None and found.inclusion.is_included():
            return candidate
    if files.get_file_from_path(f"{path.removeprefix('docs/')}/README.md") is not None:
        return f"{path.removeprefix('docs/')}/README.md"
    return None


def _reference_page(page: str) -> str:
    title, sentence, modules = REFERENCE[page]
    entries = [f"# {title}", "", sentence, ""]
    others: list[str] = []
    for entry in _entries(modules) or sorted(_pages()):
        if _pages()[entry] == page:
            entries += [f"::: {entry}", ""]
        elif modules:
            others.append(f"[`{entry.rpartition('.')[2]}`][{entry}]")
    if others:
        entries += [f"Imported from here too, and on another page: {', '.join(others)}.", ""]
    return "\n".join(entries)


def _entries(modules: list[str]) -> list[str]:
    """Return the public names of modules with the defining module."""
    stubs = _names_of_stubs()
    return [
        f"{stubs.get(name) or _home(module, name)}.{name}"
        for module in modules
        for name in _public_names(module)
    ]


@functools.cache
def _pages() -> dict[str, str]:
    """Return the page of each name: the listing page nearest to its home; "errors" for errors."""
    nearest: dict[str, tuple[int, str]] = {}
    for page, (_, _, modules) in REFERENCE.items():
        for entry in _entries(modules):
            shared = max(len(posixpath.commonprefix([each, entry])) for each in modules)
            if shared > nearest.get(entry, (0, ""))[0]:
                nearest[entry] = shared, page
    return {
        entry: "errors" if entry.endswith("Error") else page for entry, (_, page) in nearest.items()
    }


def _source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _public_names(module: str) -> list[str]:
    for node in ast.parse(_source(module).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "_HOMES"):
            names = sorted(ast.literal_eval(node.value))
            return [name for name in names if not name.startswith("_")]
    raise LookupError(f"{module} has no __all__")


@functools.cache
def _names_of_stubs() -> dict[str, str]:
    """Return the stub of each class."""
    return {
        node.name: stub
        for stub in STUBS
        for node in ast.parse(_source(stub).with_suffix(".pyi").read_text()).body
        if isinstance(node, ast.ClassDef)
    }


def _home(module: str, name: str) -> str:
    """Return the module of a name's definition: a package re-exports names of its rooms."""
    for node in ast.walk(ast.parse(_source(module).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("_"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _home(node.module, alias.name) if _source_exists(node.module) else module
    return module


def _source_exists(module: str) -> bool:
    return _source(module).exists()


def _example_page(path: Path) -> str:
    text = path.read_text()
    doc = ast.get_docstring(ast.parse(text)) or path.stem
    body = text.split('"""', 2)[2].lstrip("\n")
    title, _, rest = doc.partition("\n")
    shown = rest.strip("\n")  # keeps the indent of a first line of commands: a code block
    fence = f'``` {{.python title="examples/{path.name}" data-search-exclude}}'
    return f"# {title}\n\n{shown}\n\n{fence}\n{body}```\n"
