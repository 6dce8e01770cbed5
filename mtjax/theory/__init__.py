"""What a run holds, computes, keeps and sends, said once and by formula; below everything else, and without jax."""
