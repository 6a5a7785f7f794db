"""What crosses a process: messages of `splitpoint.v1`, their generated stubs, and the one error table."""
