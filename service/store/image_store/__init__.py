"""The store of files, a folder or S3: images and texts, folders of versions, files of vectors."""
