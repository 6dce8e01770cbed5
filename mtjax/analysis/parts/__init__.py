"""The parts of models: what each holds, computes, keeps and sends."""
