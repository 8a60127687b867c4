"""What may propose trees to the engine, behind one interface (`backends/engine/draft/base.py`)."""
