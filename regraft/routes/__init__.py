"""The routes of the API as methods of both clients, one file per subject; `regraft.routes.route` explains how."""
