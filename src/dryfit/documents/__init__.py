"""What people and programs are told of a study: documents, their renderers, and the command line."""
