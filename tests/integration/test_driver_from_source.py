"""psycopg2 may be installed under its own name: nothing asks for ``psycopg2-binary`` when it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOP = """
import importlib.metadata, os
try:
    importlib.metadata.version("psycopg2-binary")
except importlib.metadata.PackageNotFoundError:
    print("installed as psycopg2", importlib.metadata.version("psycopg2"))

from flask import Flask
from flask_idempotency import Idempotency, idempotent
from flask_idempotency.cli import cli
from flask_sqlalchemy import SQLAlchemy

app = Flask("shop")
app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
app.config["IDEMPOTENCY_STORE"] = "postgres"
db = SQLAlchemy(app)
Idempotency(app, db, scope=None)

@app.post("/payments")
@idempotent
def pay():
    return {"paid": True}, 201

with app.app_context():
    db.create_all()
for _ in range(2):
    response = app.test_client().post("/payments", headers={"Idempotency-Key": "k"})
    print(response.status_code, response.headers.get("Idempotent-Replayed"))
print(app.test_cli_runner().invoke(cli, ["check"]).output)
"""


def test_an_application_runs_on_the_driver_from_source(postgres, tmp_path):
    """All packages are there, with the driver under the name of its source distribution."""
    for folder in {sysconfig.get_path(name) for name in ("purelib", "platlib")}:
        for path in Path(folder).iterdir():
            if not path.name.startswith("psycopg2_binary-"):
                (tmp_path / path.name).symlink_to(path)
    metadata = tmp_path / "psycopg2-2.9.9.dist-info/METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: psycopg2\nVersion: 2.9.9\n", encoding="utf-8")
    environment = {
        **os.environ,
        "DATABASE_URL": postgres.database("driver"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
    }
    command = [sys.executable, "-S", "-c", SHOP]
    done = subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    first, *statuses = done.stdout.splitlines()[:3]
    assert first == "installed as psycopg2 2.9.9"
    assert statuses == ["201 None", "201 true"]
    assert "driver" in done.stdout
    assert "FAILED" not in done.stdout
