"""The page as a Hugging Face space (SDK "docker" or any Python host): `python app.py`.

Put this file beside a `requirements.txt` with `powerclip[demo]`, and the models in a folder or on the hub:

    POWERCLIP_MODELS="models/clip models/powerclip" python app.py

A space shows its app in a frame of huggingface.co, which is allowed here and nowhere else.
"""

import os

import uvicorn

from powerclip.demo.run import DemoOptions, make_engine
from powerclip.demo.server import make_app

options = DemoOptions(models=os.environ.get("POWERCLIP_MODELS", "").split(), device="auto")
app = make_app(make_engine(options), frame_ancestors="https://huggingface.co https://*.hf.space")

if __name__ == "__main__":
    uvicorn.run(app, host="0.0.0.0", port=int(os.environ.get("PORT", "7860")))
