import workers  # noqa: F401  # before torch, for which it sets the environment
