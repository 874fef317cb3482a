"""Backup and restore of a PostgreSQL and the data folder, by the commands of docs/deployment.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from service.settings import Settings
from staging.api.served import serving
from staging.external.postgres import Server
from staging.inputs.builders import image_bytes, make_image

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"


def follow(commands: str, folder: Path, programs: Path, **variables: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), str(programs), os.environ["PATH"]])
    words = ["bash", "-e", "-c", commands]
    env = {**os.environ, **variables, "PATH": path}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_was_saved_while_it_served_answers_alike_elsewhere(server: Server, tmp_path: Path) -> None:
    pictures = [image_bytes(make_image(number % 3, number)) for number in range(9)]
    section = PAGE.read_text().partition("\n**On PostgreSQL**")[2].partition("\n**With images on S3**")[0]
    save, restore = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    url = server.create_migrated()
    there, elsewhere = (one.replace("+psycopg", "") for one in (url, server.url("restored")))

    with serving(Settings(data=tmp_path / "regraft-data", database_url=url)) as served:
        served.add("v1", 4)
        path = served.filled(pictures)
        known = served.query(path, pictures[0], k=3).json()["results"]
        follow(save, tmp_path, server.programs, DATABASE_URL=there)
        served.remove(path)

    doctor, _, serve = restore.rpartition("REGRAFT_DATABASE_URL=")
    assert serve == '"$RESTORED_URL" regraft serve --data restored\n'
    told = follow(doctor, tmp_path, server.programs, DATABASE_URL=there, RESTORED_URL=elsewhere)
    assert told == "no problems found\n"
    with serving(Settings(data=tmp_path / "restored", database_url=elsewhere)) as served:
        assert served.query(path, pictures[0], k=3).json()["results"] == known
        assert served.http.get(f"{path}/items/i0/image").content == pictures[0]
    server.drop(url)
    server.drop(server.url("restored"))
