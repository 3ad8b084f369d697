// The pages' one script. Invariant: without it everything can still be read.

import { setUp as setUpActions } from "./actions.js";
import { keepFresh } from "./live.js";
import { setUp as setUpUploads } from "./upload.js";

setUpActions();
document.querySelectorAll("[data-upload]").forEach(setUpUploads);
if (document.querySelector("[data-live]")) keepFresh();
