"""What the services share: stubs, transports, checkpoint reading, the server frame, the command line."""

__version__ = "0.1.0"
