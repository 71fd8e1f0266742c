"""The API against its own document, by schemathesis."""

import json
import re
import subprocess
import sys
from pathlib import Path

from headrace.serve.openapi import document
from headrace.serve.resolve import Served
from tests.serve.conftest import Site
from tests.serve.live import serving

CHECKS = (
    "not_a_server_error,response_schema_conformance,content_type_conformance,"
    "status_code_conformance"
)


def test_the_document_has_every_path_and_no_other(site: Site) -> None:
    served = {path + "{model}" if path.endswith("/") else path for path in site.app().paths}
    assert set(json.loads(document())["paths"]) == served


def test_no_request_that_fits_the_document_breaks_the_server(site: Site, tmp_path: Path) -> None:
    """A bounded run; `schemathesis run URL/openapi.json` by hand goes on for longer."""
    site.served = Served("tiny", site.tokenizer, 2048)
    with serving(site) as url:
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--phases",
             "fuzzing", "--max-examples", "5", "--checks", CHECKS, "--request-timeout", "20"],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Selected: (\d+)/\1\s+Tested: \1\s", done.stdout), done.stdout
