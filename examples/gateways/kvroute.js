// Asks kvroute where a request goes, and reports its end; for nginx with its njs module (0.7.9 or
// newer). nginx.conf beside it says where this is called; docs/gateways.md what the answers hold.

const TAIL_BYTES = 4096;

async function send(r) {
    const body = r.requestText;
    const answer = await r.subrequest('/kvroute/select_and_reserve', {method: 'POST', body: body});
    if (answer.status != 200) {
        r.headersOut['content-type'] = 'application/json';
        r.headersOut['retry-after'] = answer.headersOut['retry-after'];
        r.return(answer.status, answer.responseText);
        return;
    }
    const selection = JSON.parse(answer.responseText);
    const headers = selection.headers || {};
    r.variables.kvroute_id = selection.selection_id;
    r.variables.kvroute_address = selection.address;
    r.variables.kvroute_rank = headers['x-data-parallel-rank'] || '';
    r.internalRedirect('@engine');
}

function read(r, data, flags) {
    // The usage stands near the end, and perhaps in two pieces of it.
    const text = r.variables.kvroute_tail + data.toString();
    r.variables.kvroute_tail = text.slice(-TAIL_BYTES);
    r.variables.kvroute_status = r.status;
    r.sendBuffer(data, flags);
}

function report(r) {
    const whole = r.variables.request_completion == 'OK';
    const found = r.variables.kvroute_tail.match(/"usage":\s*(\{(?:[^{}]|\{[^{}]*\})*\})/);
    const parts = [`"outcome":"${whole ? 'completed' : 'client_left'}"`];
    if (r.variables.kvroute_status) {
        parts.push(`"status":${r.variables.kvroute_status}`);
    }
    if (found) {
        parts.push(`"usage":${found[1]}`);
    }
    return `{${parts.join(',')}}`;
}

export default {send, read, report};
