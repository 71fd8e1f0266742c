"""Write the tables of request fields into docs/api.md, from the structs that decode them.

python scripts/api_docs.py          write
python scripts/api_docs.py --check  exit with 1 where the page is not up to date
"""

import sys
from pathlib import Path

from headrace.serve.openapi import markdown

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
BEGIN, END = "<!-- fields: made by scripts/api_docs.py -->\n", "<!-- end -->"


def whole(page: str) -> str:
    """The page with fresh tables."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + markdown() + "\n" + END + rest.partition(END)[2]


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    fresh = whole(page)
    if "--check" in sys.argv[1:]:
        return int(page != fresh)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
