"""Model families, a folder each: settings, network, costs, samples, and the types of transformers that it covers."""
