"""Stores hold named objects: a folder, object storage, a web server; and a server that shows a folder."""
