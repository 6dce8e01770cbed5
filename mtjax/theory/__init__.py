"""What a run holds, computes, keeps and sends, by formula and stated once; imports only the config, and no jax."""
