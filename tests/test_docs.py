"""What the documents name exists: linked files and headings, commands with their options, configs, components."""

import importlib
import re
import shlex
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import yaml

from rocm_ext import cli, config
from rocm_ext.base import registry
from rocm_ext.machine.profile import Profile

ROOT = Path(__file__).parents[1]
MISSION = yaml.safe_load((ROOT / "tests" / "mission.yaml").read_text())
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))
HEADS = sorted([*(ROOT / "recipe_configs").glob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")])
THEIRS = {"my_run.yaml"}  # stands for a user's own
OF_A_USERS_RECIPE = {"recipe", "extends", "layer_lr_decay"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tool(name: str) -> ModuleType:
    """A file of tools/, which is no package."""
    module = ModuleType(f"tools_{name}")
    module.__file__ = str(ROOT / "tools" / f"{name}.py")
    exec(Path(module.__file__).read_text(), module.__dict__)
    return module


@pytest.fixture(scope="module")
def site() -> ModuleType:
    return tool("site")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(found), f"{target} has no such heading"


def commands(text: str) -> list[list[str]]:
    """The arguments of each ``rocm-ext`` and ``tune run`` command in shell blocks and heads of configs."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE) or [
        text.split("\n\n")[0]
    ]
    lines = [line.lstrip("# ").strip() for block in blocks for line in block.splitlines()]
    split = [
        shlex.split(line, comments=True)
        for line in lines
        if re.match(r"(rocm-ext|tune run) ", line)
    ]
    return [words for words in split if words]


@pytest.mark.parametrize("page", [*PAGES, *HEADS, *NOTEBOOKS], ids=name)
def test_commands_and_configs_are_real(page, site):
    for words in commands(page.read_text() if page in HEADS else site.page(page)):
        if words[0] == "rocm-ext":  # argparse ends the program where an argument is missing
            args, more = cli.parser_of(words[1]).parse_known_args(words[2:])
            assert all("=" in word for word in more), f"{more} of {words} are no options"
            configs = [args.config] if getattr(args, "config", None) else []
        else:
            configs = [words[words.index("--config") + 1]]
        for each in configs:
            assert each in THEIRS or (page.parent / each).is_file() or config.find(each).is_file()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_can_be_imported(page):
    text = page.read_text().split("\n### Changed")[0]  # there stand names that are gone
    for dotted in set(re.findall(r"\brocm_ext(?:\.[A-Za-z_]+)+\b", text)) - {"rocm_ext.recipes"}:
        parts = dotted.split(".")
        for count in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:count]))
                break
            except ModuleNotFoundError:
                continue
        for part in parts[count:]:
            found = getattr(found, part)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_keys_are_known(page):
    known = OF_A_USERS_RECIPE.union(*map(config.defaults, registry.TITLES))
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        content = yaml.safe_load(block)
        if "title" in content:  # a hardware profile
            assert Profile.from_dict(page.stem, content).chips
        else:
            assert content.keys() <= known


# ------------------------------------------------------------------------------------------- what users ask for


def in_one_line(text: str) -> str:
    """Without line breaks, and without the marks of comments."""
    return re.sub(r"[\s#]+", " ", text)


@pytest.mark.parametrize("part", MISSION)
def test_what_users_ask_for_is_answered(part):
    """By a page, which has this phrase, or by a test."""
    lost = []
    for wanted, answer in MISSION[part].items():
        if isinstance(answer, str):
            file, test = answer.split("::")
            found = f"\ndef {test}(" in (ROOT / "tests" / file).read_text()
        else:
            ((page, phrase),) = answer.items()
            found = in_one_line(phrase) in in_one_line((ROOT / page).read_text())
        if not found:
            lost.append(f"{wanted}: {answer}")
    assert not lost


# ------------------------------------------------------------------------------------------- the site


@pytest.mark.parametrize(
    "entry", re.findall("^::: (.+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
)
def test_the_reference_names_what_exists(entry):
    module, _, attribute = entry.rpartition(".")
    found = getattr(importlib.import_module(module), attribute, None) or importlib.import_module(
        entry
    )
    assert found.__doc__, "the site shows its docstring"


# ------------------------------------------------------------------------------------------- pictures
def test_the_picture_of_the_rooms_has_them_all():
    picture = ElementTree.fromstring(tool("pictures").rooms())
    drawn = {group[2].text.split()[0] for group in picture.iter("{http://www.w3.org/2000/svg}g")}
    folders = {path.parent.name for path in ROOT.glob("rocm_ext/*/__init__.py")}
    assert drawn == folders | {"recipes", "hook", "pocket"}
