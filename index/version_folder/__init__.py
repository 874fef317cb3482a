"""Version folders and their archives: read, verify and write. Start with `index.version_folder.folder`."""
