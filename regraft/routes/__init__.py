"""The routes of the API as methods of both clients, a file a subject, each written once (`regraft.routes.route`)."""
