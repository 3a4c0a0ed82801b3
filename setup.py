"""What pyproject.toml cannot state: the wheel's description is the README with absolute links."""

import re
import tomllib
from pathlib import Path

import setuptools

ROOT = Path(__file__).parent


def description(readme: str, repository: str | None) -> str:
    """Return a README in which no link or picture is relative, since it is shown elsewhere.

    Args:
        readme: Markdown; links are relative to its place, or complete.
        repository: address of the repository, which serves files below /blob/HEAD and /raw/HEAD.
            None: it has none; links keep their text alone, and pictures are left out.
    """

    def absolute(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if "://" in target:
            return match[0]
        if repository is None:
            return "" if picture else text
        file = "README.md" + target if target.startswith("#") else target
        return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/HEAD/{file})"

    parts = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, part) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setuptools.setup(
        long_description=description(
            (ROOT / "README.md").read_text(encoding="utf-8"),
            project.get("urls", {}).get("Repository"),
        ),
        long_description_content_type="text/markdown",
    )
