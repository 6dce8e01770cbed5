"""Expert parallelism: how tokens reach experts on other ranks."""
