"""The TTNN surface on the mesh: what every device holds, literal collectives, no hidden communication."""
