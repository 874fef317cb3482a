"""Backup and restore of the default data folder, by the commands of docs/deployment.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from service.settings import Settings
from staging.api.served import serving

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"


def follow(commands: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path}
    words = ["bash", "-e", "-c", commands]
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_was_saved_while_it_served_answers_alike_elsewhere(tmp_path: Path, pictures: list[bytes]) -> None:
    section = PAGE.read_text().partition("\n## Backup and restore\n")[2].partition("\n## ")[0]
    save, restore = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    assert restore.endswith("regraft serve --data restored\n")

    with serving(Settings(data=tmp_path / "regraft-data")) as served:
        served.add("v1", 4)
        path = served.filled(pictures)
        known = served.query(path, pictures[0], k=3).json()["results"]
        follow(save, tmp_path)
        assert (tmp_path / "regraft-data" / "regraft.db-wal").exists()  # what a copy of the database alone would lack
        served.remove(path)

    told = follow(restore.replace("regraft serve --data restored\n", ""), tmp_path)
    assert told == "no problems found\n"
    with serving(Settings(data=tmp_path / "restored")) as served:
        assert served.query(path, pictures[0], k=3).json()["results"] == known
        assert served.http.get(f"{path}/items/i0/image").content == pictures[0]
