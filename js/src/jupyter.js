// The Jupyter Server behind the page, if there is one, and what it answers.

export const PATIENCE = 1500; // milliseconds that a way gets

// JupyterLab and Notebook say in the page where their server is; Colab and VS Code have none that a page could ask.
export function server() {
  let page = {};
  try {
    page = JSON.parse(document.getElementById("jupyter-config-data")?.textContent ?? "{}");
  } catch {
    // some other page's element
  }
  const base = page.baseUrl ?? document.body?.dataset?.baseUrl;
  if (!base) return null;
  const headers = { "Content-Type": "application/json" };
  const cookie = document.cookie.match(/(?:^|; )_xsrf=([^;]+)/);
  if (cookie) headers["X-XSRFToken"] = decodeURIComponent(cookie[1]);
  if (page.token) headers.Authorization = `token ${page.token}`;
  const opens = page.opens ?? "lab/tree/"; // where it shows a notebook
  return { base: base.endsWith("/") ? base : `${base}/`, opens, headers, token: page.token ?? "" };
}

// The server's answer: { status, body }. The status is 0 when none comes in time, the body null when there is no JSON.
export async function ask({ base, headers }, path, body = null, patience = PATIENCE) {
  const hurry = new AbortController();
  const timer = setTimeout(() => hurry.abort(), patience);
  const sent = body ? { method: "POST", body: JSON.stringify(body) } : { method: "GET" };
  let status = 0;
  try {
    const answer = await fetch(base + path, { ...sent, headers, credentials: "same-origin", signal: hurry.signal });
    status = answer.status;
    return { status, body: await answer.json() };
  } catch {
    return { status, body: null };
  } finally {
    clearTimeout(timer);
  }
}

// The answer of a POST; null when it is refused, or does not come in time.
export async function post(behind, path, body, patience) {
  const { status, body: said } = await ask(behind, path, body, patience);
  return status >= 200 && status < 300 ? (said ?? {}) : null;
}

// Whether the kernel was interrupted.
export async function interrupt(kernel, find = server) {
  const behind = kernel ? find() : null;
  return Boolean(behind && (await post(behind, `api/kernels/${encodeURIComponent(kernel)}/interrupt`, {}, PATIENCE)));
}
