"""Everything that knows HTTP: the application, and the client and command that talk to it."""
