"""What pyproject.toml cannot state: the wheel's description is the README with absolute links."""

import re
import tomllib
from pathlib import Path

import setuptools

ROOT = Path(__file__).parent


def description(readme: str, repository: str) -> str:
    """Return a README whose links and pictures lead to the repository, from wherever it is shown.

    Args:
        readme: Markdown; links are relative to its place, or complete.
        repository: address of the repository, which serves files below /blob/HEAD and /raw/HEAD.
    """

    def absolute(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if "://" not in target:
            file = "README.md" + target if target.startswith("#") else target
            target = f"{repository}/{'raw' if picture else 'blob'}/HEAD/{file}"
        return f"{picture}[{text}]({target})"

    parts = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, part) for part in parts[::2]]
    return "".join(parts)


project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
setuptools.setup(
    long_description=description(
        (ROOT / "README.md").read_text(encoding="utf-8"), project["urls"]["Repository"]
    ),
    long_description_content_type="text/markdown",
)
