"""A real service that seals, merges and writes down a few items at once, and has room for one gallery: `PORT`."""

from __future__ import annotations

import sys

from service.http import app
from service.settings import Settings
from service.store.database.migration import upgrade
from staging.states.small_segments import make_small

if __name__ == "__main__":
    make_small()
    settings = Settings(port=int(sys.argv[1]), memory=1)
    upgrade(settings)
    app.serve(settings)
