"""What both planes share: settings, job types, messages, errors. The standard library and pydantic only."""
